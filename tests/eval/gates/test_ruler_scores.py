# SPDX-License-Identifier: Apache-2.0
"""Thresholds of RULER's scores: tasks by their intervals, the mean by its error; no score fails."""

import json

import pytest

from eval.gates.ruler_scores import judge, pass_scores
from eval.ruler.scoring import Scores, average, task_score
from recipes.spec.gate import GateShutError

LENGTH = 65_536


def scores(**of_tasks: list[float]) -> Scores:
    rows = [task_score(task, LENGTH, values) for task, values in of_tasks.items()]
    return Scores(
        suite="ruler-offline", scores=rows, averages=[average(LENGTH, rows)],
        effective_length=None, not_stated_because="few tasks",
    )  # fmt: skip


SHARES = scores(niah_single_1=[1.0] * 80 + [0.0] * 20)


# Wilson's interval of 80 of 100 is 0.711 to 0.867; 1.96^2 * 0.75 * 0.25 / 0.05^2 = 288.1.
@pytest.mark.parametrize(
    ("least", "passed", "state", "would_do"),
    [
        (0.70, True, "met", None),
        (0.75, True, "too few samples to tell", 289),
        (0.85, False, "too few samples to tell", 196),
        (0.90, False, "not met", None),
    ],
)
def test_a_task_of_shares_is_judged_by_wilson_s_interval(least, passed, state, would_do):
    [one] = judge({"niah_single_1": least}, SHARES)
    assert (one.passed, one.state, one.would_do) == (passed, state, would_do)
    assert (one.name, one.measured, one.counted) == ("ruler niah_single_1", 0.8, 100)
    assert "score 0.800 +- 0.040 of niah_single_1 at 65,536 tokens over 100 samples" in one.said


# Scores 0.6 and 1.0, 50 of each: the standard error is 0.2 * sqrt(100 / 99) / 10 = 0.0201.
@pytest.mark.parametrize(
    ("least", "passed", "state"),
    [(0.75, True, "met"), (0.78, True, "too few samples to tell"), (0.9, False, "not met")],
)
def test_a_task_of_parts_is_judged_by_its_standard_error(least, passed, state):
    [one] = judge({"vt": least}, scores(vt=[0.6, 1.0] * 50))
    assert (one.passed, one.state) == (passed, state)
    assert one.standard_error == pytest.approx(0.020101, abs=1e-6)


# Errors 0.04 and 0.0201 of independent tasks: sqrt(0.04^2 + 0.0201^2) / 2 = 0.02238.
@pytest.mark.parametrize(
    ("least", "passed", "state"),
    [(0.7, True, "met"), (0.81, False, "too few samples to tell"), (0.85, False, "not met")],
)
def test_the_mean_is_judged_by_the_errors_of_its_tasks(least, passed, state):
    both = scores(niah_single_1=[1.0] * 80 + [0.0] * 20, vt=[0.6, 1.0] * 50)
    [one] = judge({"mean": least}, both)
    assert (one.passed, one.state, one.counted) == (passed, state, 200)
    assert one.standard_error == pytest.approx(0.022383, abs=1e-6)
    assert "mean score 0.800 +- 0.022 of 2 tasks at 65,536 tokens over 200 samples" in one.said


def test_a_task_without_a_score_shuts_the_gate_and_the_file_says_why(tmp_path):
    pass_scores(tmp_path, "long", {"niah_single_1": 0.7}, SHARES)
    path = tmp_path / "eval" / "long.ruler.gate.json"
    assert json.loads(path.read_text())["open"]
    with pytest.raises(GateShutError, match="the gate after long is shut: ruler cwe: there are no"):
        pass_scores(tmp_path, "long", {"niah_single_1": 0.7, "cwe": 0.1}, SHARES)
    kept = json.loads(path.read_text())
    assert (kept["open"], [each["passed"] for each in kept["judgements"]]) == (False, [True, False])
