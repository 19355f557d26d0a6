# SPDX-License-Identifier: Apache-2.0
"""The cost of a step's metrics at a tiny size: both kinds of step, and their losses."""

import pytest

from benchmarks.harness.paced_training import CAUSES
from tests.benchmarks.test_benchmarks_run import page_of, rows_of

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_every_second_step_has_the_metrics_and_no_loss_is_changed(tmp_path):
    size = ["--seq", "128", "--sequences", "2", "--pairs", "4"]
    page = page_of("metrics_cost", *size, out=tmp_path / "page.md")
    kinds = {row[0]: row for row in rows_of(page, ["metrics"])}
    assert [kind[2] for kind in kinds.values()] == ["4", "4"]
    assert int(kinds["with"][-1].replace(",", "")) > 2 * int(kinds["without"][-1])
    assert [row[0] for row in rows_of(page, ["time"])] == ["clock", "CPU"]
    assert [row[0] for row in rows_of(page, ["cause"])] == [*CAUSES]


def test_too_few_pairs_are_refused(tmp_path):
    out = tmp_path / "page.md"
    out.write_text("")
    error = "--pairs is 3; it must be at least 4"
    page_of("metrics_cost", "--pairs", "3", out=out, status=2, error=error)
