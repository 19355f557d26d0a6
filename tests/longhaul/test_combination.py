# SPDX-License-Identifier: Apache-2.0
"""`longhaul pretrain --card --ladder --stage`: combinations that no row is needed for."""

import pytest

from longhaul import combination
from recipes.collection import ROWS
from recipes.ladders import LADDERS
from recipes.layout import ContextParallel, Layout
from recipes.units import K

PROLONG = ("pretrain", "--card", "qwen25_7b", "--ladder", "prolong")
STAND_IN = Layout(tp=4, cp=ContextParallel.ulysses(1), dp=4)


@pytest.fixture
def asked(monkeypatch) -> list[tuple]:
    """Stand in for the planner; return what it is asked, in order."""
    questions: list[tuple] = []

    def layout_for(card, ladder, stage, cluster_name, nodes):
        questions.append((card.name, ladder.name, stage.seq_length, cluster_name, nodes))
        return STAND_IN

    monkeypatch.setattr(combination, "layout_for", layout_for)
    return questions


def test_a_combination_is_laid_out_on_the_nodes_named(asked):
    made = combination.choose("qwen25_7b", "prolong", "64k", nodes=2, cluster_name="dgx_b200")
    assert asked == [("qwen25_7b", "prolong", 64 * K, "dgx_b200", 2)]
    assert (made.layout, made.nodes) == (STAND_IN, 2)


def test_one_node_of_the_usual_cluster_is_meant_where_none_is_named(asked):
    combination.choose("qwen25_7b", "prolong", "512K")
    assert asked == [("qwen25_7b", "prolong", 512 * K, "dgx_h100", 1)]


def test_the_only_stage_of_a_ladder_needs_no_naming(asked):
    made = combination.choose("llama31_8b", "ultralong_1m", "")
    assert made.stage == LADDERS["ultralong_1m"].stages[0]


def test_a_length_that_a_page_prints_names_its_stage(asked):
    assert combination.choose("llama3_8b", "longrecipe_128k", "38,400").stage.seq_length == 38_400


def test_tiny_on_the_cpu_has_the_layout_of_its_row_and_asks_no_planner(asked):
    made = combination.choose("tiny", "tiny", "512", device="cpu")
    assert (made.layout, made.nodes, asked) == (ROWS["tiny_512"].layout, 1, [])


def test_tiny_on_the_cpu_has_two_ranks_where_it_has_no_row(asked):
    made = combination.choose("tiny", "nemo", "16K", device="cpu")
    assert made.layout == ROWS["tiny_8k"].layout
    assert asked == []


def test_tiny_on_gpus_is_the_planner_s(asked):
    assert combination.choose("tiny", "tiny", "8K").layout == STAND_IN


def test_a_ladder_of_other_cards_and_a_shipped_row_are_noted(asked):
    other = combination.choose("qwen25_7b", "prolong", "64K")
    assert "ladder prolong is for llama3_8b" in next(other.notes())
    shipped = combination.choose("llama3_8b", "prolong", "64K")
    (said,) = shipped.notes()
    assert "llama3_8b_prolong_64k is shipped with another layout" in said
    assert not list(combination.choose("llama3_8b", "yarn", "64K").notes())[1:]


def test_the_planner_lays_out_all_gpus_of_the_nodes():
    found = combination.layout_for(
        combination.CARDS["tiny"], LADDERS["tiny"], LADDERS["tiny"].stages[0], "dgx_h100", 2
    )
    assert (found.world_size, found.device) == (16, "cuda")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pretrain", "--card", "tinny", "--ladder", "tiny"), "no card is called 'tinny'; did you"),
        ((*PROLONG[:-1], "prolon"), "no ladder is called 'prolon'; did you mean prolong?"),
        (PROLONG[:-2], "--ladder is missing; there are tiny, nemo"),
        (("pretrain", "--stage", "64K"), "--card is missing; there are tiny"),
        (PROLONG, "--stage is missing; ladder prolong has 64K, 512K"),
        ((*PROLONG, "--stage", "128K"), "has no stage of 128K; it has 64K, 512K"),
        ((*PROLONG, "--stage", "64X"), "as 64K; not 64X"),
        ((*PROLONG, "--stage", "64K", "--nodes", "0"), "--nodes is 0; it must be at least 1"),
        ((*PROLONG, "--stage", "64K", "--cluster", "dgx_h10"), "did you mean dgx_h100"),
        ((*PROLONG, "--factory", "tiny_8k"), "name one recipe: --factory NAME or --yaml FILE"),
        (("pretrain", "--factory", "tiny_8k", "--nodes", "2"), "trainer.num_nodes=N"),
        (
            ("pretrain", "--card", "tiny", "--ladder", "tiny", "--stage", "8K", "--device", "cpu",
             "--nodes", "2"),
            "leave them out with --device cpu",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value),
)  # fmt: skip
def test_a_mistake_is_answered_with_what_would_be_right(answer, words, said):
    assert said in answer(*words).error()


def test_a_combination_becomes_the_recipe_of_its_name(answer, asked, tmp_path):
    from recipes import yaml_file

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


def test_tiny_on_the_cpu_shows_what_it_would_run(answer):
    code, out, err = answer(
        "pretrain", "--card", "tiny", "--ladder", "tiny", "--stage", "8K", "--device", "cpu",
        "--dryrun",
    )  # fmt: skip
    assert code == 0, err
    assert "--nproc-per-node 2" in out
