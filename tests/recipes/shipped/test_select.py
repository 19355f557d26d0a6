# SPDX-License-Identifier: Apache-2.0
"""`longhaul pretrain --card --ladder --stage`: combinations that no row is needed for."""

from dataclasses import replace

import pytest

from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.shipped import select
from recipes.shipped.machines import Machines
from recipes.shipped.table import ROWS
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.units import K

PROLONG = ("pretrain", "--card", "qwen25_7b", "--ladder", "prolong")
STAND_IN = Layout(tp=4, cp=ContextParallel.ulysses(1), dp=4)


@pytest.fixture
def asked(monkeypatch) -> list[tuple]:
    """Stand in for the planner; return what it is asked, in order."""
    questions: list[tuple] = []

    def layout_for(card, ladder, stage, cluster_name, gpus):
        questions.append((card.name, ladder.name, stage.seq_length, cluster_name, gpus))
        return replace(STAND_IN, dp=gpus // STAND_IN.tp)

    monkeypatch.setattr(select, "layout_for", layout_for)
    return questions


def test_a_combination_is_laid_out_on_the_nodes_named(asked):
    made = select.choose("qwen25_7b", "prolong", "64k", Machines(nodes=2, cluster="dgx_b200"))
    assert asked == [("qwen25_7b", "prolong", 64 * K, "dgx_b200", 16)]
    assert (made.layout, made.nodes) == (STAND_IN, 2)


def test_one_node_of_the_usual_cluster_is_meant_where_none_is_named(asked):
    select.choose("qwen25_7b", "prolong", "512K")
    assert asked == [("qwen25_7b", "prolong", 512 * K, "dgx_h100", 8)]


def test_the_only_stage_of_a_ladder_needs_no_naming(asked):
    made = select.choose("llama31_8b", "ultralong_1m", "")
    assert made.stage == LADDERS["ultralong_1m"].stages[0]


def test_a_length_that_a_page_prints_names_its_stage(asked):
    assert select.choose("llama3_8b", "longrecipe_128k", "38,400").stage.seq_length == 38_400


def test_tiny_on_the_cpu_has_the_layout_of_its_row_and_asks_no_planner(asked):
    made = select.choose("tiny", "tiny", "512", Machines(device="cpu"))
    assert (made.layout, made.nodes, asked) == (ROWS["tiny_512"].layout, 1, [])


def test_tiny_on_the_cpu_has_two_ranks_where_it_has_no_row(asked):
    made = select.choose("tiny", "nemo", "16K", Machines(device="cpu"))
    assert made.layout == ROWS["tiny_8k"].layout
    assert asked == []


def test_tiny_on_gpus_is_the_planner_s(asked):
    assert select.choose("tiny", "tiny", "8K").layout == replace(STAND_IN, dp=2)


def test_a_ladder_of_other_cards_and_a_shipped_row_are_noted(asked):
    other = select.choose("qwen25_7b", "prolong", "64K")
    assert "ladder prolong is for llama3_8b" in next(select.notes(other))
    shipped = select.choose("llama3_8b", "prolong", "64K")
    (said,) = select.notes(shipped)
    assert "llama3_8b_prolong_64k is shipped with another layout" in said
    (said, recomputed) = select.notes(select.choose("llama3_8b", "yarn", "64K"))
    assert "ladder yarn is for" in said
    assert "recomputed for llama3_8b" in recomputed


@pytest.mark.parametrize(
    ("card", "ladder", "words"),
    [
        ("llama32_1b", "gene_64k", "has 64 divisors, for heads of 128, and heads of llama32_1b"),
        ("llama32_1b", "longrope2", "heads of llama32_1b have 64"),
    ],
)
def test_a_rotation_that_is_not_of_the_card_s_heads_is_refused(asked, card, ladder, words):
    stage = str(LADDERS[ladder].stages[0].seq_length)
    with pytest.raises(ValueError, match=f"ladder {ladder} cannot train {card} at ") as refused:
        select.choose(card, ladder, stage)
    assert words in str(refused.value)
    assert asked == []


def test_why_a_ladder_s_rotation_is_wrong_for_a_card_is_noted(asked):
    _, said = select.notes(select.choose("llama31_8b", "prolong", "64K"))
    assert said.endswith("a base alone takes away the scaling that llama31_8b was trained with")


def test_a_row_that_is_shipped_is_taken_as_it_is(asked):
    row = select.row_of("llama31_8b", "nemo", "64K", Machines())
    assert row == ROWS["llama31_8b_nemo_64k"]
    tiny = select.row_of("tiny", "nemo", "16K", Machines())
    assert (tiny.layout, tiny.cluster) == (ROWS["tiny_8k"].layout, "local")
    assert asked == []


@pytest.mark.parametrize(
    ("nodes", "taken"), [(None, 1), (4, 4)], ids=["the fewest that fit", "those that are named"]
)
def test_a_combination_becomes_a_row_of_its_name(asked, nodes, taken):
    row = select.row_of("qwen3_8b", "qwen25_1m", "64K", Machines(nodes=nodes))
    assert (row.name, row.nodes, row.cluster) == ("qwen3_8b_qwen25_1m_64k", taken, "dgx_h100")
    assert [question[-1] for question in asked] == [8 * taken]


def test_a_model_that_one_node_does_not_hold_is_given_more(asked):
    row = select.row_of("llama31_405b", "nemo", "128K", Machines())
    assert row.nodes > 1


def test_nodes_that_do_not_divide_are_told_a_number_of_gpus_that_works(answer):
    said = answer(
        "pretrain", "--card", "llama31_8b", "--ladder", "prolong", "--stage", "64K", "--nodes", "3"
    ).error()
    assert "fits 24 GPUs of dgx_h100" in said
    assert "16 GPUs would do" in said
    assert "a node of dgx_h100 has 8 GPUs" in said


def test_the_planner_lays_out_all_gpus_of_the_nodes():
    found = select.layout_for(
        CARDS["tiny"], LADDERS["tiny"], LADDERS["tiny"].stages[0], "dgx_h100", 16
    )
    assert (found.world_size, found.device) == (16, "cuda")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pretrain", "--card", "tinny", "--ladder", "tiny"), "no card is called 'tinny'; did you"),
        ((*PROLONG[:-1], "prolon"), "no ladder is called 'prolon'; did you mean prolong?"),
        (PROLONG[:-2], "--ladder is missing; there are tiny, nemo"),
        (("pretrain", "--stage", "64K"), "--card is missing; there are tiny"),
        (PROLONG, "--stage is missing; name one of ladder prolong, which has 64K, 512K"),
        ((*PROLONG, "--stage", "128K"), "has no stage of 128K; it has 64K, 512K"),
        ((*PROLONG, "--stage", "64X"), "as 64K; not 64X"),
        ((*PROLONG, "--stage", "64K", "--nodes", "0"), "--nodes is 0; it must be at least 1"),
        ((*PROLONG, "--stage", "64K", "--cluster", "dgx_h10"), "did you mean dgx_h100"),
        ((*PROLONG, "--factory", "tiny_8k"), "name one recipe: --factory NAME or --yaml FILE"),
        (("pretrain", "tiny_8k"), "with --ladder and --stage; to train tiny_8k: --factory tiny_8k"),
        (("pretrain", "--factory", "tiny_8k", "--nodes", "2"), "for CPU ranks of this machine"),
        (
            ("pretrain", "--card", "tiny", "--ladder", "tiny", "--stage", "8K", "--device", "cpu",
             "--nodes", "2"),
            "--nodes cannot go with CPU ranks; leave it out",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value),
)  # fmt: skip
def test_a_mistake_is_answered_with_what_would_be_right(answer, words, said):
    assert said in answer(*words).error()


def test_a_combination_becomes_the_recipe_of_its_name(answer, asked, tmp_path):
    from recipes.resolved import yaml_file

    path = tmp_path / "recipe.yaml"
    code, _, shown = answer(
        *PROLONG, "--stage", "512K", "--nodes", 2, "optim.config.lr=2e-5", "--to-yaml", path
    )
    assert code == 0, shown
    assert "note: ladder prolong is for llama3_8b" in shown
    recipe = yaml_file.read(path)
    assert recipe.log.name == "qwen25_7b_prolong_512k"
    assert recipe.resume.start == "runs/qwen25_7b_prolong/stages/qwen25_7b_prolong_64k/checkpoints"
    assert (recipe.trainer.num_nodes, recipe.trainer.devices) == (2, 8)
    assert recipe.model.config.rope.base == 128_000_000
    assert recipe.optim.config.lr == 2e-5


def test_a_rank_is_waited_for_as_long_as_the_cluster_that_is_named_takes(asked):
    waits = {}
    for name in ("dgx_a100", "dgx_b200"):
        recipe = select.choose("qwen25_7b", "prolong", "512K", Machines(cluster=name))()
        waits[name] = recipe.trainer.callbacks[4].seconds
    assert waits["dgx_a100"] > 2 * waits["dgx_b200"]


def test_tiny_on_the_cpu_shows_what_it_would_run(answer):
    code, out, err = answer(
        "pretrain", "--card", "tiny", "--ladder", "tiny", "--stage", "8K", "--device", "cpu",
        "--dryrun",
    )  # fmt: skip
    assert code == 0, err
    assert "--nproc-per-node 2" in out
