# SPDX-License-Identifier: Apache-2.0
"""The benchmark of evaluations while training at a tiny size: that it runs and its page."""

import pytest

from tests.benchmarks.test_benchmarks_run import page_of, rows_of

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_both_trainings_take_the_same_steps_and_one_of_them_is_evaluated(tmp_path):
    size = ["--seq", "128", "--sequences", "2", "--turns", "2", "--turn", "3", "--every", "2"]
    page = page_of("evaluation_while_training", *size, out=tmp_path / "page.md")
    without, evaluated = rows_of(page, ("training", "", "steps", "evaluations"))
    assert without[:4] == ["without", "", "6", "0"]
    assert evaluated[:4] == ["with", "", "6", "3"]
    assert [row[0] for row in rows_of(page, ("after step",))] == ["2", "4", "6"]
    clock, cpu = rows_of(page, ("time", "", "median step", "all steps", "share"))
    assert [row[0] for row in (clock, cpu)] == ["clock", "CPU"]
    assert float(clock[4].rstrip("%")) > 0
    assert all(float(row[at]) > 0 for row in (clock, cpu) for at in (2, 3))
    assert "gradient norms of all 6 steps are equal" in page
