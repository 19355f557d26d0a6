# SPDX-License-Identifier: Apache-2.0
"""A ladder in a file of one's own: what it becomes, and what is refused with its place."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from custom_modules.rope.config import RopeScaling
from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.notation import ladder_file
from recipes.spec.gate import Gate
from recipes.spec.stage import Cosine, Linear
from recipes.spec.units import K, M

LLAMA = CARDS["llama3_8b"]
STAGE = {
    "seq_length": "64K", "rope": {"method": "yarn", "factor": 8}, "tokens": "500M",
    "tokens_per_batch": "4M", "lr": {"peak": 1e-5},
}  # fmt: skip


def written(folder: Path, *stages: dict, **fields: object) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"name": "mine", "stages": list(stages) or [STAGE], **fields}))
    return path


def test_lengths_are_binary_budgets_decimal_and_the_rotation_is_the_card_s(tmp_path):
    [stage] = ladder_file.read(written(tmp_path), LLAMA).stages
    assert (stage.seq_length, stage.tokens, stage.tokens_per_batch) == (64 * K, 500_000_000, 4 * M)
    assert stage.rope == RopeScaling.yarn(base=500_000, factor=8, original_length=8 * K)
    assert (stage.start, stage.lr) == ("card", Cosine(peak=1e-5))


def test_all_fields_of_a_stage_are_read(tmp_path):
    second = STAGE | {
        "seq_length": "128K", "rope": "linear:factor=16", "documents": "within",
        "lr": {"peak": 1e-6, "schedule": "linear", "warmup_ratio": 0.0}, "weight_decay": 0.0,
        "positions": {"kind": "pose", "target_length": "512K"}, "gate": {"rise": None},
    }  # fmt: skip
    first, second = ladder_file.read(written(tmp_path, STAGE, second), LLAMA).stages
    assert second.rope.method == "linear"
    assert second.lr == Linear(peak=1e-6, warmup_ratio=0.0)
    assert (second.target_length, second.start) == (512 * K, "previous")
    assert second.gate.rise is None
    assert second.gate.forgotten == first.gate.forgotten


def test_the_suites_of_a_ladder_and_their_thresholds_are_read(tmp_path):
    gate = {"suites": [{"task": "niah_single_1", "length": "64K", "least": 0.9}]}
    suites = [{"tasks": ["niah_single_1"], "lengths": ["4K", 65_536], "limit": 9, "include": "own"}]
    ladder = ladder_file.read(written(tmp_path, STAGE | {"gate": gate}, suites=suites), LLAMA)
    [suite] = ladder.suites
    assert (suite.tasks, suite.lengths, suite.limit) == (("niah_single_1",), (4 * K, 64 * K), 9)
    assert suite.include == str(tmp_path / "own")
    [threshold] = ladder.stages[0].gate.suites
    assert (threshold.length, threshold.least, threshold.drop) == (64 * K, 0.9, None)


@pytest.mark.parametrize(
    ("suites", "threshold", "said"),
    [
        ([], {"task": "mmlu", "least": 0.5}, "thresholds of suites, and the ladder runs none"),
        (["mmlu"], {"task": "mmlu"}, "suites mmlu has no threshold; state least, drop or both"),
        (["mmlu"], {"task": "mmlu", "drop": -1}, "suites mmlu has drop -1; it must be at least 0"),
        (["mmlu"], {"task": "mmlu", "most": 1}, "gate: suites[0] has no field 'most'"),
        (["niah"], {"task": "niah", "least": 1, "length": "128K"}, "is scored within its own cont"),
        (["mmlu", "mmlu"], None, "ladder mine has mmlu twice in suites; name it once"),
        (["mmlu,arc"], None, "has tasks ['mmlu,arc']; write each as one of the list"),
    ],
    ids=str,
)
def test_suites_and_thresholds_that_cannot_be_are_refused(tmp_path, suites, threshold, said):
    stage = STAGE if threshold is None else STAGE | {"gate": {"suites": [threshold]}}
    path = written(tmp_path, stage, suites=[{"tasks": [name]} for name in suites])
    with pytest.raises(ValueError, match=r"mine\.yaml") as told:
        ladder_file.read(path, LLAMA)
    assert said in str(told.value)


def test_thresholds_of_ruler_are_read_and_refused(tmp_path):
    stated = {"samples": "ruler/own", "least": {"vt": 0.9, "mean": 0.8}, "length": "32K"}

    def read(**changed):
        stage = STAGE | {"gate": {"ruler": stated | changed}}
        return ladder_file.read(written(tmp_path, stage), LLAMA).stages[0].gate

    gate = read()
    assert gate.ruler.samples == str(tmp_path / "ruler" / "own")
    assert (gate.ruler.length, dict(gate.ruler.least)) == (32 * K, {"vt": 0.9, "mean": 0.8})
    assert gate.of_evaluation == Gate()
    for changed, said in (
        ({"least": {}}, "gate ruler has no threshold; state least, such as {mean: 0.8}"),
        ({"least": {"vt": 90}}, "gate ruler has 90 for vt; scores are shares, above 0 and up to"),
        ({"limit": 0}, "gate ruler has limit 0; it must be positive"),
        ({"length": "128K"}, "ruler at 131,072 tokens, and the stage trains for 65,536"),
        ({"most": 1}, "gate: ruler has no field 'most'"),
    ):
        with pytest.raises(ValueError, match=r"mine\.yaml") as told:
            read(**changed)
        assert said in str(told.value)


def test_a_ladder_in_python_may_begin_with_a_shipped_one(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass, replace\n"
        "from recipes.ladders.yarn import YARN\nprint('read')\n"
        "@dataclass\nclass Note:\n    text: str\nMINE = ALSO = replace(YARN, name='mine')\n"
    )
    for _ in range(2):
        assert ladder_file.read(path).stages == LADDERS["yarn"].stages
    assert capsys.readouterr() == ("", "read\n")  # run once, and stdout is left to results


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from dataclasses import replace\nfrom recipes.ladders.yarn import YARN\n"
         "A = replace(YARN, name='a')\nB = replace(YARN, name='b')\n", "defines 2 ladders"),
        ("import sys\nsys.exit(0)\n", "line 2: SystemExit: 0"),
    ],
)  # fmt: skip
def test_a_python_file_without_one_ladder_is_refused(tmp_path, text, said):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"mine\.py") as told:
        ladder_file.read(path)
    assert said in str(told.value)


def test_numbers_of_a_rotation_are_read_as_those_of_a_rate(tmp_path):
    rope = {"method": "ntk", "factor": 8, "base": "8e6"}
    assert (
        ladder_file.read(written(tmp_path, STAGE | {"rope": rope}), LLAMA).stages[0].rope.base
        == 8e6
    )


def test_a_folder_with_words_of_the_template_is_quoted_whole(tmp_path):
    card = replace(LLAMA, path="my models/EUROPE x")
    sizes = {"seq_length": 512 * K, "tokens": 10**9, "tokens_per_batch": 4096 * K}
    text = ladder_file.of_one_stage(tmp_path / "l.yaml", card, **sizes)
    assert "--card 'my models/EUROPE x'" in text


@pytest.mark.parametrize(
    ("card", "length", "start", "rope"),
    [("tiny", 2 * K, "scratch", "native"), ("llama3_8b", 160 * K, "card", "yarn")],
)
def test_a_card_without_weights_is_trained_from_scratch_with_its_rotation_as_it_is(
    tmp_path, card, length, start, rope
):
    sizes = {"seq_length": length, "tokens": 10 * length, "tokens_per_batch": length}
    path = tmp_path / "l.yaml"
    text = ladder_file.of_one_stage(path, CARDS[card], **sizes)
    (stage,) = ladder_file.from_text(text, path, CARDS[card]).stages
    assert stage.start == start
    assert (stage.rope if stage.rope == "native" else stage.rope.method) == rope


def test_the_template_is_a_ladder(tmp_path):
    path = tmp_path / "My ladder-2.yaml"
    path.write_text(ladder_file.template(path))
    ladder = ladder_file.read(path, LLAMA)
    assert ladder.name == "my_ladder_2"
    assert [stage.seq_length for stage in ladder.stages] == [64 * K, 128 * K]
    assert f"'{path}'" in path.read_text()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seq_len": "64K"}, "stages[0] has no field 'seq_len'; did you mean seq_length"),
        ({"seq_length": "64Q"}, "stages[0].seq_length is '64Q'; a length is a number, with K or M"),
        ({"tokens": "5"}, "stages[0]: tokens 5 is less than one batch of 4,194,304"),
        ({"tokens_per_batch": "100K"}, "tokens_per_batch 102,400 is not a multiple of seq_length"),
        ({"lr": {"peak": 2.0}}, "stages[0]: peak learning rate is 2.0; it must lie between 0"),
        ({"lr": 1e-5}, "stages[0].lr is 1e-05; expected a mapping of fields"),
        (
            {"lr": {"peak": 1e-5, "schedule": "step"}},
            "lr.schedule is 'step'; it should be",
        ),
        ({"rope": {"method": "yarnn", "factor": 2}}, "RoPE method 'yarnn' is unknown"),
        ({"rope": {"method": "yarn"}}, "rotation yarn has no factor"),
        ({"rope": {"factor": 8}}, "rope has no method; state it"),
        ({"rope": {"method": "native"}}, "the card's own rotation is written as rope: native"),
        ({"rope": "yarn:8"}, "'8' of 'yarn:8' is not KEY=VALUE"),
        ({"rope": "none.json"}, "none.json cannot be read"),
        ({"documents": "apart"}, "documents is 'apart'; it should be 'across' or 'within'"),
        ({"start": "previous"}, "the first stage has no previous one"),
        ({"positions": {"kind": "posee"}}, "stages[0]: positions: kind is 'posee'"),
    ],
    ids=str,
)
def test_what_a_stage_cannot_have_is_refused_with_its_place(tmp_path, changed, said):
    path = written(tmp_path, STAGE | changed)
    with pytest.raises(ValueError, match=r"mine\.yaml") as told:
        ladder_file.read(path, LLAMA)
    assert said in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.yaml", None, "there is no ladder file"),
        ("mine.toml", "", "is not a ladder file; a ladder is a file *.yaml, *.yml or *.py"),
        ("mine.yaml", "", "is empty, not a mapping; `longhaul ladders new FILE` writes one"),
        ("mine.yaml", "name: mine\nstages: []", "ladder mine has no stage"),
        ("mine.yaml", "stages: []", "lacks 'name'; add it"),
        ("mine.py", "x = 1", "defines 0 ladders"),
        ("mine.py", "x =", "line 1: SyntaxError"),
        ("mine.py", "\n\n1 / 0", "line 3: ZeroDivisionError"),
    ],
    ids=str,
)
def test_a_file_that_is_no_ladder_is_refused(tmp_path, name, content, said):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"mine|none") as told:
        ladder_file.read(path)
    assert said in str(told.value)


def test_a_name_that_no_folder_should_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"name is '\.\./mine'; folders and jobs are named by it"):
        ladder_file.read(written(tmp_path, name="../mine"), LLAMA)


def test_without_a_card_a_rotation_states_its_base(tmp_path):
    with pytest.raises(ValueError, match=r"rope has no base; state it, or name the card: --card"):
        ladder_file.read(written(tmp_path))
