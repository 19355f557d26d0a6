# SPDX-License-Identifier: Apache-2.0
"""`longhaul checkpoint`: what is listed, verified, removed and averaged, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from longhaul.run_folder.lock import in_use
from recipes.checkpoints.files import described, for_marker
from recipes.checkpoints.marker import newest_checkpoint, start_checkpoint
from tests.longhaul.json_units import not_numbers
from tests.recipes.checkpoints.test_average import load, model, of_stage, save

FACTORS = {2: 1.0, 4: 0.5, 6: -0.9}
"""Weights of the small model at each step are these times its own."""


@pytest.fixture
def run(tmp_path, megatron_rank) -> Path:
    """Return a run of one stage with three checkpoints."""
    folder = tmp_path / "run"
    stage = folder / "stages" / "tiny_16"
    stage.parent.mkdir(parents=True)
    of_stage(stage, step=2)
    for step, factor in FACTORS.items():
        made = save(stage / "checkpoints" / f"step={step}", model(factor), step=step)
        marker = json.loads((made / "longhaul.json").read_text())
        files = for_marker(described(made))
        (made / "longhaul.json").write_text(json.dumps({**marker, "files": files}))
    return folder


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in run.glob("stages/*/checkpoints/step=*"))


def test_checkpoints_are_listed_with_size_layout_and_what_is_wrong(answer, run):
    (run / "stages/tiny_16/checkpoints/step=7/weights").mkdir(parents=True)
    code, out, _ = answer("checkpoint", "list", run)
    assert code == 0
    assert [line.split("│")[2].strip() for line in out.splitlines() if "tiny_16 │" in line] == [
        "2", "4", "6", "7",
    ]  # fmt: skip
    assert "step=7 of tiny_16: it was not finished" in out
    found = json.loads(answer("checkpoint", "list", run, "--json").out)
    assert [*not_numbers(found)] == []
    assert [one["complete"] for one in found] == [True, True, True, False]
    assert found[0]["optimizer"] is False
    assert found[0]["bytes"] > 1000


def test_the_ranks_of_a_training_are_listed_and_none_of_an_average(answer, run, monkeypatch):
    weights = run / "stages" / "tiny_16" / "checkpoints" / "step=2" / "weights"
    monkeypatch.setenv("COLUMNS", "200")  # for all columns
    assert answer("checkpoint", "list", run).out.count("│ a command") == 3
    index = weights / ".metadata"
    index.write_bytes(index.read_bytes() + b"optimizer.state")
    found = json.loads(answer("checkpoint", "list", run, "--json").out)
    assert [one["layout"] for one in found] == [{"ranks": 1}, {}, {}]


def test_a_damaged_file_and_a_damaged_marker_are_named(answer, run):
    checkpoints = run / "stages" / "tiny_16" / "checkpoints"
    assert answer("checkpoint", "verify", run).code == 0
    (data,) = (checkpoints / "step=4" / "weights").glob("__0_0.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    (checkpoints / "step=2" / "longhaul.json").write_text("{")
    code, out, _ = answer("checkpoint", "verify", run)
    assert code == 1
    assert f"{data} is damaged: its SHA-256 differs" in out
    assert f"{checkpoints / 'step=2' / 'longhaul.json'} is damaged" in out
    assert out.count("verified") == 1
    folder = checkpoints / "step=4"
    for one, damaged in ((folder, 1), (folder.with_name("step=6"), 0)):
        code, out, _ = answer("checkpoint", "verify", one, "--json")
        assert (code, len(json.loads(out)[0]["damaged"])) == (int(damaged > 0), damaged)
    code, out, _ = answer("checkpoint", "prune", run, "--keep-last", "1")
    assert code == 0
    assert steps(run) == [2, 6]  # the one whose marker may be restored stays


def test_a_policy_removes_what_it_does_not_keep_and_a_dry_run_only_says_so(answer, run):
    prune = ("checkpoint", "prune", run, "--keep-last", "1")
    code, out, _ = answer(*prune, "--dry-run")
    assert code == 0
    assert out.count("would remove") == 2
    assert "would be free" in out
    assert steps(run) == [2, 4, 6]
    answer("checkpoint", "prune", run, "--keep-every", "4")
    assert steps(run) == [4, 6]
    answer("checkpoint", "prune", run, "--keep-last", "5")
    assert steps(run) == [4, 6]
    with in_use(run / "stages" / "tiny_16"):
        assert "is in use by process" in answer(*prune).error()
    next_stage = run / "stages" / "tiny_32"
    (next_stage / "checkpoints").mkdir(parents=True)
    start = run / "stages/tiny_16/checkpoints/step=4"
    (next_stage / "config.yaml").write_text(json.dumps({"resume": {"start": str(start)}}))
    assert "no checkpoint to remove" in answer(*prune).out
    (next_stage / "config.yaml").write_text(json.dumps({"resume": {"start": None}}))
    removed = json.loads(answer(*prune, "--json").out)["removed"]
    assert [one["step"] for one in removed] == [4]
    assert newest_checkpoint(start.parent) == start.with_name("step=6")


def test_the_mean_of_the_last_is_a_stage_with_the_mean_of_their_weights(answer, run, tmp_path):
    code, out, said = answer("checkpoint", "average", run, "--last", "3", "--to", tmp_path / "mean")
    assert code == 0, said
    found = load(tmp_path / "mean/checkpoints/step=6", model(7.0))
    expected = model(sum(FACTORS.values()) / 3).state_dict()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name.removeprefix("module.")])
    assert start_checkpoint(tmp_path / "mean" / "checkpoints").name == "step=6"
    assert "step=2" in json.loads((tmp_path / "mean" / "stage.json").read_text())["start"]
    assert "longhaul export --from" in out + said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("average", "--last", "4", "--to", "mean"), "--last is 4, and tiny_16 has 3 complete"),
        (("average", "--to", "mean"), "name a second checkpoint, or add --last K"),
        (("average", "b", "--last", "2", "--to", "mean"), "name a second checkpoint, or add"),
        (("prune",), "it is not known what to keep; add --keep-last N or --keep-every N"),
        (("list", "--stage", "64K"), "has no stage of 64K"),
    ],
    ids=" ".join,
)
def test_options_that_do_not_fit_are_refused(answer, run, words, said):
    (run / "stages" / "tiny_16" / "stage.json").unlink()
    assert said in answer("checkpoint", words[0], run, *words[1:]).error()
    assert steps(run) == [2, 4, 6]


def test_a_folder_that_is_not_a_run_or_has_no_checkpoint_is_refused(answer, run, tmp_path):
    assert "there is no run folder at" in answer("checkpoint", "list", tmp_path / "nowhere").error()
    assert "expected a run folder" in answer("checkpoint", "list", tmp_path).error()
    shutil.rmtree(run / "stages" / "tiny_16" / "checkpoints")
    (run / "stages" / "tiny_16" / "checkpoints").mkdir()
    assert "no checkpoint is in" in answer("checkpoint", "list", run).error()
