# SPDX-License-Identifier: Apache-2.0
"""`longhaul recipes` and `longhaul show`."""

import json
import shlex
from dataclasses import replace

import pytest
from rich.console import Console

from custom_modules.memory.config import Offload, Recompute
from longhaul.cli import COMMANDS, loaded
from longhaul.commands import recipes, show
from longhaul.pages import recipe_facts
from longhaul.terminal import console
from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.shipped import rotation
from recipes.shipped.row import Row
from recipes.shipped.table import ROWS
from recipes.spec import naming
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.stage import Stage
from recipes.spec.units import K, M

NAME = "llama31_8b_nemo_64k"
SEARCHED = (("tiny", "tiny"), ("llama31_8b", "nemo"), ("llama32_1b", "nemo"))
POSITIONS_SKIP = Row(
    card=CARDS["llama3_8b"],
    ladder=LADDERS["longrecipe_128k"],
    seq_length=38_400,
    layout=Layout(cp=ContextParallel.hybrid(ulysses=4, ring=4, heads_per_stage=8)),
    nodes=2,
    cluster="dgx_h200",
    pinned="a stand-in",
)


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that gives commands a terminal of so many columns."""

    def of(columns: int) -> None:
        def made(**settings: object) -> Console:
            return Console(**settings, force_terminal=True, color_system=None, width=columns)

        monkeypatch.setattr(console, "Console", made)

    return of


def lines_of(answer, *words: str) -> list[str]:
    code, out, err = answer(*words)
    assert code == 0, err
    return out.splitlines()


def test_the_table_has_a_line_for_each_recipe_where_no_terminal_limits_it(answer):
    header, *lines = lines_of(answer, "recipes")
    assert header.split() == list(recipes.COLUMNS)
    assert [line.split()[0] for line in lines] == list(ROWS)
    assert all(row.ladder.source in line for row, line in zip(ROWS.values(), lines, strict=True))


def test_a_line_says_length_rotation_tokens_and_gpus():
    assert recipes.cells(ROWS[NAME])[:-1] == (
        NAME, "llama31_8b", "64K", "llama3 x8 (the card's own)", "2.1B", "1 x 8 H100",
    )  # fmt: skip
    assert recipes.cells(ROWS["tiny_8k"])[2:-1] == (
        "8K",
        "yarn x4, base 40,000",
        "131K",
        "CPU, 2 ranks",
    )
    assert recipes.cells(POSITIONS_SKIP)[2:-1] == (
        "38,400 for 128K", "base 131,500,000", "383M", "2 x 8 H200",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["YARN"], ["tiny_8k"]),
        (
            ["llama", "128k"],
            [
                "llama31_8b_nemo_128k",
                "llama31_8b_nemo_128k_fp8",
                "llama32_1b_nemo_128k",
                "llama32_1b_nemo_128k_fp8",
            ],
        ),
        (["own", "cpu"], ["tiny_512"]),
        (["2410.02660", "x32", "16K"], ["llama32_1b_nemo_16k"]),
    ],
)
def test_words_search_all_columns_and_all_must_be_there(words, names):
    rows = {name: row for name, row in ROWS.items() if (row.card.name, row.ladder.name) in SEARCHED}
    assert [row.name for row in recipes.matching(words, rows)] == names


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tinny"], "no recipe has 'tinny'; did you mean tiny"),
        (["llama31_8b_nemo_63k"], f"did you mean {NAME}"),
        (["tiny", "zzzzzz"], "no recipe has 'zzzzzz'; `longhaul recipes` lists them all"),
        (["tiny", "nemo"], "all of these words: 'tiny' is in tiny_512, tiny_2k, tiny_8k; 'nemo'"),
        (["llama31_8b", "512k"], "longhaul ladders new llama31_8b_512k.yaml --card llama31_8b"),
        (["foo"], "no recipe has 'foo'; `longhaul recipes` lists them all"),
        (["--cards", "zzzzzz"], "no card has 'zzzzzz'; leave the words out"),
    ],
)
def test_words_that_find_nothing_are_told_the_nearest(answer, words, said):
    assert said in answer("recipes", *words).error()


def test_recipes_are_searched_by_what_their_gpus_are(answer):
    of_h200 = [line.split()[0] for line in lines_of(answer, "recipes", "h200")[1:]]
    assert of_h200 == ["llama3_8b_five_million_5m"]
    of_h100 = [line.split()[0] for line in lines_of(answer, "recipes", "h100")[1:]]
    assert of_h100 == [name for name, row in ROWS.items() if row.cluster == "dgx_h100"]


def test_the_table_in_numbers(answer):
    found = json.loads("\n".join(lines_of(answer, "recipes", "tiny_8k", "--json")))
    assert found == [
        {
            "name": "tiny_8k", "card": "tiny", "ladder": "tiny", "seq_length": 8 * K,
            "target_length": 8 * K,
            "rope": {"method": "yarn", "base": 40_000, "factor": 4.0, "original_length": 2 * K},
            "rope_of_card": False, "tokens": 16 * 8 * K, "cluster": "local", "nodes": 1,
            "gpu": None, "ranks": 2, "device": "cpu", "source": "ours",
        }
    ]  # fmt: skip


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_in_a_terminal_sources_stand_below_and_no_recipe_is_cut(answer, terminal, columns):
    terminal(columns)
    lines = lines_of(answer, "recipes")
    assert max(map(len, lines)) <= columns
    end = next(number for number, line in enumerate(lines) if not line.strip())
    assert [line.split()[0] for line in lines[1:end] if line[0] != " "] == list(ROWS)
    ladders = {row.ladder.name for row in ROWS.values()}
    assert ladders <= {line.split()[0] for line in lines[end + 2 :]}


def test_a_wide_terminal_has_the_whole_table(answer, terminal):
    terminal(400)
    assert len(lines_of(answer, "recipes")) == 1 + len(ROWS)


def test_a_page_says_model_ladder_data_layout_and_each_stage(answer):
    page = "\n".join(lines_of(answer, "show", NAME))
    row = ROWS[NAME]
    for words in (
        f"{NAME}: llama31_8b at 64K, stage 2 of 3",
        "32 layers of 4,096, MLP of 14,336; 32 heads (8 KV) of 128; vocabulary of 128,256; 8.03B",
        "native context 131,072 tokens, llama3 x8 of 8,192 tokens, base 500,000",
        "meta-llama/Llama-3.1-8B",
        row.ladder.source,
        row.ladder.data,
        "starts from the one before; Adam with beta2 0.95, weight decay 0.1",
        f"based on: {row.source}",
    ):
        assert words in page
    stages = [line for line in page.splitlines() if "cosine" in line]
    assert [line.split()[0] for line in stages] == ["16K", ">", "128K"]
    assert "2.1B" in stages[1]
    assert "64 x 64K" in stages[1]
    assert "cosine 1e-05 to 1e-06, 50 to warm up  across     consecutive" in stages[1]


def test_what_all_stages_have_alike_is_said_once_in_a_narrow_terminal(answer, terminal):
    terminal(80)
    lines = lines_of(answer, "show", NAME)
    page = lines[: lines.index("next")]
    assert max(map(len, page)) <= 80
    assert "         positions consecutive, documents across" in [line.rstrip() for line in page]


def test_a_page_in_numbers(answer):
    found = json.loads("\n".join(lines_of(answer, "show", NAME, "--json")))
    assert found["card"]["hf_id"] == "meta-llama/Llama-3.1-8B"
    assert found["card"]["native_rope"]["method"] == "llama3"
    assert [stage["seq_length"] for stage in found["ladder"]["stages"]] == [16 * K, 64 * K, 128 * K]
    stage = found["ladder"]["stages"][1]
    assert (stage["steps"], stage["warmup_steps"], stage["lr"]["shape"]) == (500, 50, "cosine")
    assert (found["stage"], found["layout"]["tp"]) == (64 * K, ROWS[NAME].layout.tp)
    assert found["cluster"] == ROWS[NAME].cluster
    assert found["commands"] == [line for line, _ in show.commands(ROWS[NAME])]


def test_facts_that_make_a_context_hard_to_extend_are_on_the_page_and_in_numbers(answer):
    asked = ("--card", "qwen3_14b", "--ladder", "qwen25_1m", "--stage", "64K", "--gpus", "8")
    page = "\n".join(lines_of(answer, "show", *asked))
    assert "extends  2 of 4 choices that add up to make extension hard (OlmPool)" in page
    assert "few KV heads: 5 query heads share each of 8 (more than 4, Llama-3-8B's)" in page
    found = json.loads("\n".join(lines_of(answer, "show", *asked, "--json")))
    assert [fact["name"] for fact in found["extension_facts"][:2]] == ["qk_norm", "kv_heads"]
    assert "extends" not in "\n".join(lines_of(answer, "show", "llama3_8b_prolong_64k"))


def test_every_command_that_a_page_names_is_there_with_its_options():
    there = {name: loaded(name) for name in COMMANDS}
    for row in ROWS.values():
        for line, _ in show.commands(row):
            program, name, *words = shlex.split(line)
            assert program == "longhaul"
            assert there[name].make_context(name, words).params


def test_a_variant_is_trained_by_its_own_name_or_layout():
    alone, many = (
        [line for line, _ in show.commands(ROWS[name])]
        for name in (
            "llama31_8b_nemo_64k_on_1xh100",
            "llama31_8b_fifteen_million_15m_on_32xh100",
        )
    )
    assert alone[-1] == "longhaul pretrain --factory llama31_8b_nemo_64k_on_1xh100"
    assert "longhaul show llama31_8b_nemo_16k" in alone
    assert many[-1].endswith(
        "--layout 'tp2 hybrid1x16/1 full tile-loss tile-mlp offload-inputs:120.1'"
    )


def test_a_first_stage_has_none_before_it_and_a_later_one_names_it():
    first = [line for line, _ in show.commands(ROWS["tiny_512"])]
    later = [line for line, _ in show.commands(ROWS["tiny_2k"])]
    assert "longhaul show tiny_512" in later
    assert not [line for line in first if line.startswith("longhaul show")]


def test_a_model_without_published_weights_is_not_imported():
    assert not [line for line, _ in show.commands(ROWS["tiny_2k"]) if "import" in line]
    lines = [line for line, _ in show.commands(ROWS[NAME])]
    assert lines[0] == "longhaul import --from meta-llama/Llama-3.1-8B --card llama31_8b"


@pytest.mark.parametrize("name", ROWS)
def test_a_recipe_is_given_tokens_of_the_tokenizer_that_its_weights_have(name):
    row = ROWS[name]
    (line,) = (line for line, _ in show.commands(row) if " prepare " in line)
    if row.ladder.stages[0].start == "scratch":
        assert f"--vocab-size {row.card.vocab}" in line
    else:
        imported = row.card.hf_revision and f"models/{row.card.name}/hugging_face"
        named = imported or row.card.hf_id or "YOUR_TOKENIZER"
        assert f"--tokenizer {named} " in line
        assert "--source DOCUMENTS" in line
        assert "--vocab-size" not in line


def test_weights_that_nobody_has_published_are_the_user_s(answer):
    lines = lines_of(answer, "show", "nemotron4_15b_nemo_16k")
    assert "weights  yours, since those of nemotron4_15b are not published" in (
        line.rstrip() for line in lines
    )
    (at,) = (number for number, line in enumerate(lines) if " import " in line)
    assert lines[at] == "    longhaul import --from YOUR_WEIGHTS --card nemotron4_15b"
    assert "to models/nemotron4_15b; or put a checkpoint there, or name" in lines[at - 1]


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("llama3_8b_prolong_64k", "Meta-Llama-3-8B-Instruct", "Meta-Llama-3-8B"),
        ("llama31_8b_ultralong_1m", "Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("llama3_8b_longrecipe_128k_38400", "Meta-Llama-3-8B-Instruct", "Meta-Llama-3-8B"),
    ],
)
def test_a_source_that_began_with_other_weights_is_said_beside_those_imported(
    answer, terminal, name, theirs, ours
):
    name = next(row for row in ROWS if name.startswith(row))
    terminal(400)
    page = "\n".join(lines_of(answer, "show", name))
    assert f"meta-llama/{ours}, which the import below fetches; the source began with" in page
    assert f"--from meta-llama/{ours} --card" in page
    assert f"the source began with meta-llama/{theirs}:\n" in page


@pytest.mark.parametrize("name", ["llama2_7b_lwm_32k", "llama3_8b_five_million_5m"])
def test_a_page_says_what_is_ours_and_where_it_departs_from_its_source(answer, terminal, name):
    ladder = ROWS[name].ladder
    terminal(400)
    page = "\n".join(lines_of(answer, "show", name))
    for sentence in (*ladder.ours, *ladder.departures):
        assert f"- {sentence}" in page
    found = json.loads("\n".join(lines_of(answer, "show", name, "--json")))
    assert found["ladder"]["ours"] == list(ladder.ours)
    assert found["ladder"]["departures"] == list(ladder.departures)
    assert found["ladder"]["starts_from"] == ladder.starts_from


def test_an_unknown_recipe_is_told_the_nearest(answer):
    assert "did you mean tiny_2k" in answer("show", "tiny_2kk").error()


def test_a_page_is_printed_or_written_not_both(answer):
    assert "take one of them" in answer("show", NAME, "--json", "--to-yaml", "x.yaml").error()


def test_the_recipe_written_is_the_one_that_pretrain_runs(answer, tmp_path):
    from recipes.resolved import yaml_file
    from recipes.shipped.factories import recipe_named

    path = tmp_path / "recipe.yaml"
    assert lines_of(answer, "show", NAME, "--to-yaml", str(path))[-1].endswith("recipe.yaml")
    assert yaml_file.read(path) == recipe_named(NAME)
    shown = lines_of(answer, "pretrain", "--yaml", str(path), "--dryrun")
    assert "seq_length: 65536" in "\n".join(shown)


@pytest.mark.parametrize(
    ("card", "which"),
    [
        ("olmo3_8k_7b", "; on full layers only"),
        ("smollm3_4k_3b", "; on the layers that rotate"),
        ("llama31_8b", ""),
    ],
)
def test_a_rotation_that_some_layers_lack_says_so(card, which):
    stage = LADDERS["nemo"].stages[1]
    turned, *_ = recipe_facts.training(stage, CARDS[card])
    rope = recipe_facts.resolved(stage.rope, CARDS[card])
    assert turned == recipe_facts.rotation_in_full(rope) + which


def test_what_waits_on_the_host_is_said():
    offload = Offload(tensors="both", cap_gib=64.5, every=2)
    kept = Layout(recompute=Recompute(kind="full"), offload=offload, optimizer_offload=0.5)
    *_, host = recipe_facts.layout(replace(POSITIONS_SKIP, layout=kept))
    assert host == (
        "on the host: layer inputs and attention outputs of one layer in 2, up to 64.5 GiB a rank; "
        "50% of the optimizer"
    )


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        (512, "512"),
        (853_000, "853K"),
        (1_720_320, "1.72M"),
        (21 * 10**9, "21B"),
        (8e11, "800B"),
        (15 * 10**11, "1.5T"),
    ],
)
def test_an_amount_has_three_figures(tokens, shown):
    assert naming.amount(tokens) == shown


def test_a_constant_rate_and_a_line_are_said():
    lwm, yarn = LADDERS["lwm"].stages[0], LADDERS["yarn"].stages[0]
    assert recipe_facts.schedule(lwm) == "constant 4e-05, 100 to warm up"
    assert recipe_facts.schedule(yarn) == "line 2e-05 to 0, 20 to warm up"


def test_a_layout_in_words():
    ranks, batch, kept, host = recipe_facts.layout(replace(POSITIONS_SKIP, layout=replace(
        POSITIONS_SKIP.layout, tp=2, dp=3)))  # fmt: skip
    assert ranks == (
        "96 GPUs on 2 dgx_h200 nodes: TP 2 x CP 16 (hybrid 4 x 4, 8 heads at a time) x DP 3"
    )
    assert batch == "micro-batch 1, accumulation 32, bf16"
    assert kept == "recompute none; tiling none; sharding optimizer"
    assert host == "on the host: nothing"
    alone = replace(POSITIONS_SKIP, layout=Layout(), nodes=1)
    assert next(recipe_facts.layout(alone)) == "1 GPU on 1 dgx_h200 node: no parallelism"
    chunked = replace(alone, layout=Layout(cp=ContextParallel.head_chunked(1), pp=2))
    assert next(recipe_facts.layout(chunked)).endswith(": CP 1 (head_chunked) x PP 2")


def test_a_card_that_the_ladder_is_not_for_is_noted():
    said = rotation.of_other_cards(LADDERS["prolong"], CARDS["qwen25_7b"])
    assert said.startswith("ladder prolong is for llama3_8b; its rotations were not chosen for")
    assert rotation.of_other_cards(LADDERS["prolong"], CARDS["llama3_8b"]) == ""


def test_every_stage_of_every_ladder_can_be_described():
    for ladder in LADDERS.values():
        card = CARDS[ladder.cards[0]]
        for stage in ladder.stages:
            assert isinstance(stage, Stage)
            row = Row(card=card, ladder=ladder, seq_length=stage.seq_length, layout=Layout(),
                      cluster="dgx_h100", nodes=1, pinned="a stand-in")  # fmt: skip
            assert all(recipes.cells(row))
            json.dumps(show.content(row))


def test_tokens_of_a_batch_are_sequences():
    assert (
        recipe_facts.batch(replace(LADDERS["nemo"].stages[0], tokens_per_batch=4 * M))
        == "256 x 16K"
    )
