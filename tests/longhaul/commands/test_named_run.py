# SPDX-License-Identifier: Apache-2.0
"""The run of a command, which is named as RUN or as `--run RUN`."""

import pytest

SEARCH = ("--stage", "tiny_2k", "--target", "8K", "--out", "divisors.json")
COMMANDS = (
    ("status",), ("evaluate",), ("rope", "search", *SEARCH),
    ("doctor", "run"), ("doctor", "hang"), ("doctor", "spike"), ("report",),
)  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_both_ways_name_the_same_run(answer, tmp_path, words):
    run = tmp_path / "no run"
    as_argument = answer(*words, run)
    assert as_argument == answer(*words, "--run", run)
    assert as_argument.code != 0
    assert f"{run}" in as_argument.err


@pytest.mark.parametrize("words", [("status",), ("report",)], ids=" ".join)
def test_no_run_and_two_runs_are_one_sentence(answer, words):
    none = answer(*words).error()
    assert none.endswith("no run is named; add its folder, such as runs/tiny, or --run FOLDER")
    both = answer(*words, "runs/a", "--run", "runs/b").error()
    assert both.endswith("runs/a and --run runs/b both name a run; leave one of them out")
