# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of preparing documents at a tiny size: that they run and what their pages hold."""

import pytest

from tests.benchmarks.test_benchmarks_run import page_of, rows_of

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_documents_are_prepared_by_all_contestants(tmp_path):
    page = page_of("prepare", "--mb", "2", "--rounds", "1", out=tmp_path / "page.md")
    rows = rows_of(page, ["what", "median, s"])
    assert [row[0] for row in rows] == ["ours", "Megatron's way", "datasets", "bare"]
    assert all(float(row[1]) > 0 and float(row[4]) > 0 for row in rows)


def test_the_extremes_of_a_preparation_are_measured(tmp_path):
    size = ["--line-mb", "10", "--documents", "10000"]
    page = page_of("prepare_extremes", *size, out=tmp_path / "page.md")
    assert rows_of(page, ["documents"])[0][0] == "10,000"
    (line,) = rows_of(page, ["MB of text"])
    assert line[4] == "yes"


def test_a_killed_preparation_is_compared_with_an_undisturbed_one(tmp_path):
    size = ["--mb", "6", "--kills", "1", "--without-ray"]
    page = page_of("reliability.prepare", *size, out=tmp_path / "page.md")
    (row,) = rows_of(page, ["what", "parts done at each kill"])
    assert row[2] == "yes"
