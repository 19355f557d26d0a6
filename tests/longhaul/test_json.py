# SPDX-License-Identifier: Apache-2.0
"""What commands print with `--json`: under a name with a unit is a number."""

import json

import pytest

from eval.run_folder import evaluation_path, write_json
from longhaul.commands import probe
from tests.longhaul.commands.test_probe import CP, _measured
from tests.longhaul.commands.test_status import make_run
from tests.longhaul.doctor.test_spike_checks import a_run
from tests.longhaul.json_units import not_numbers

EVALUATION = {
    "stage": "tiny_512", "seq_length": 512, "eval_length": 512, "documents": 1, "tokens": 512,
    "ranges": [{"start": 0, "stop": 512, "loss": 2.5, "tokens": 512}],
}  # fmt: skip


def numbers_of(answered) -> int:
    """Return how many names with a unit an answer has; fail where one is not a number."""
    found = json.loads(answered.out)
    assert [*not_numbers(found)] == []
    return sum(word in answered.out for word in ("tokens", "bytes", "seconds", "length", "steps"))


@pytest.mark.parametrize(
    "words",
    [
        ("recipes", "llama"),
        ("recipes", "qwen3"),
        ("show", "tiny_8k"),
        ("plan", "llama31_8b", "--seq", "64K"),
        ("plan", "llama3_8b", "--ladder", "prolong", "--nodes", "4"),
        ("batch", "--seq", "64K", "--tokens-per-batch", "4M", "--dp", "8"),
        ("clusters",),
        ("doctor", "oom", "--factory", "llama3_8b_nemo_64k"),
        ("doctor", "slow", "--factory", "llama3_8b_nemo_64k"),
        ("rope", "--card", "tiny", "--method", "linear:factor=4"),
    ],
    ids=" ".join,
)
def test_a_command_without_a_run_has_numbers_under_names_with_units(answer, words):
    assert numbers_of(answer(*words, "--json"))


def test_probe_has_numbers_under_names_with_units(answer, monkeypatch):
    monkeypatch.setattr(probe, "measure_on_ranks", lambda *_: [_measured("ring", 0.0)])
    answered = answer(*CP[:-4], "--seq", "8K", "--json")
    assert numbers_of(answered)
    assert json.loads(answered.out)["seq_length_tokens"] == 8192


def test_commands_of_a_run_have_numbers_under_names_with_units(answer, tmp_path):
    run = make_run(tmp_path / "run")
    write_json(evaluation_path(run, "tiny_512"), EVALUATION)
    for words in (("status", run), ("report", "--run", run)):
        assert numbers_of(answer(*words, "--json")), words
    assert numbers_of(answer("doctor", "spike", "--run", a_run(tmp_path / "spiked"), "--json"))


def test_a_file_in_place_of_a_run_folder_is_named(answer, tmp_path):
    run = make_run(tmp_path / "run")
    file = run / "run.json"
    for words in (
        ("report", file), ("report", run, file), ("status", file),
        ("checkpoint", "list", file), ("doctor", "run", file),
        ("data", "inspect", "--run", file),
    ):  # fmt: skip
        said = answer(*words).error()
        assert f"{file} is a file; expected a run folder, which has a run.json" in said


def test_a_run_without_an_evaluation_says_so_and_has_a_page(answer, tmp_path):
    run = make_run(tmp_path / "run")
    code, shown, said = answer("report", run)
    assert code == 0, said
    assert "No stage of this run has been evaluated yet." in shown
    assert (run / "report.html").is_file()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"seq_length_tokens": "8K"}, ["seq_length_tokens is '8K'"]),
        ({"rows": [{"peak_bytes": 1}, {"peak_bytes": "1"}]}, ["rows.peak_bytes is '1'"]),
        ({"time_seconds": {"a": 1.5, "b": "1 s"}}, ["time_seconds is '1 s'"]),
        ({"steps": True, "gpu": "H100", "left_seconds": None}, ["steps is True"]),
    ],
)
def test_what_is_not_a_number_is_noticed(content, said):
    assert [*not_numbers(content)] == said
