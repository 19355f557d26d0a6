# SPDX-License-Identifier: Apache-2.0
"""One of the planted faults in a real training on two ranks: that it is named everywhere."""

import pytest

from tests.benchmarks.test_benchmarks_run import page_of, rows_of

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_a_slow_rank_is_named_by_the_record_the_alert_and_the_watcher(tmp_path):
    page = page_of("reliability.planted_faults", "--faults", "SlowRank", out=tmp_path / "page.md")
    (row,) = rows_of(page, ("planted", "named in health.jsonl"))
    assert row[:2] == ["SlowRank", "straggler"]
    assert row[2].startswith("rank 1 takes ")
    assert row[3:6] == ["straggler", "straggler", "-"]
    assert "1 of 1 trainings were judged right" in page
