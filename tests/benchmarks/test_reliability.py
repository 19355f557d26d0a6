# SPDX-License-Identifier: Apache-2.0
"""The reliability benchmarks at a tiny size: that they run, and that their claims hold here."""

import json
import os
import subprocess
import sys

import psutil
import pytest

from benchmarks.reliability import left_behind, soak_page
from tests.benchmarks.test_benchmarks_run import page_of, rows_of


@pytest.mark.slow
@pytest.mark.nightly  # tests/runs has kills (test_resume) and failed saves (test_failed_saves)
@pytest.mark.timeout(1800)  # seven starts of two ranks
def test_a_stage_that_is_killed_in_saves_and_at_its_start_ends_with_the_same_losses(tmp_path):
    size = ["--kills", "3", "--steps", "27", "--grace", "20"]
    page = page_of("reliability.kills", *size, out=tmp_path / "page.md")
    claims = rows_of(page, ["claim"])
    assert len(claims) == 5
    assert all(row[1] == "holds" for row in claims)
    kills = rows_of(page, ["number", "killed, moment"])
    assert [row[1].partition(",")[0] for row in kills] == ["rank", "ranks", "agent"]
    assert any(row[4] == "yes" for row in kills)  # in a save


@pytest.mark.slow
@pytest.mark.nightly  # tests/longhaul/test_damaged has every kind of file too
def test_damages_of_each_kind_of_file_are_refused_by_name(tmp_path):
    size = ["--flips", "28", "--cuts", "14"]
    page = page_of("reliability.flips", *size, out=tmp_path / "page.md")
    rows = {row[0]: row[2:] for row in rows_of(page, ["file"])}
    assert len(rows) == 15
    flips, cuts, *_, named, unrefused, used = rows["all"]
    assert (flips, cuts, named, unrefused, used) == ("28", "14", "42", "0", "0")


@pytest.mark.slow
@pytest.mark.nightly  # tests/runs/test_layouts has these and more
def test_a_stage_has_the_same_losses_under_another_layout(tmp_path):
    size = ["--steps", "6", "--layouts", "CP 2", "PP 2"]
    page = page_of("reliability.layouts", *size, out=tmp_path / "page.md")
    rows = rows_of(page, ["layout"])
    assert [row[0] for row in rows] == ["CP 2", "PP 2"]
    assert all(float(row[3]) <= 1e-4 for row in rows)


def test_what_a_command_leaves_is_found_by_its_mark():
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    environment = os.environ | {left_behind.MARK: "of this test"}
    with subprocess.Popen(words, env=environment) as process:
        assert [each.pid for each in left_behind.marked("of this test")] == [process.pid]
        held = left_behind.held(psutil.Process(process.pid))
        assert held.resident >= held.unshared > 0
        assert (held.threads, held.sockets, held.children) == (1, 0, 0)
        process.kill()
    assert left_behind.marked("of this test") == []


def line(minute: float, unshared: int, **more: int) -> dict:
    held = left_behind.Held(unshared, unshared, 1, 3, 0, 0, 0)._asdict() | more
    shared = {"semaphores": 0, "segments": 0, "temporary_files": 0}
    return {"minute": minute, "processes": {"rank 0": held}, **shared}


def test_a_soak_compares_the_medians_of_ten_minutes_and_bounds_each_minute(tmp_path):
    """A sample may fall into a step; a median of ten minutes may not grow."""
    steady = [1_000_000, 1_010_000, 1_080_000, 990_000] * 10
    later = [each + 25_000 * (minute > 20) for minute, each in enumerate(steady)]
    once = [*steady[:20], 1_200_000, *steady[21:]]
    for number, (of, holds) in enumerate([(steady, True), (later, False), (once, False)]):
        lines = [line(10 + minute, each) for minute, each in enumerate(of)]
        lines.append({"minute": 50, "end": True, "exit_code": 1, "processes_left": []})
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / soak_page.SAMPLES).write_text("".join(json.dumps(each) + "\n" for each in lines))
        assert soak_page.page_of(folder)[1] == holds


@pytest.mark.parametrize(
    ("last", "left", "holds"),
    [
        (line(12, 1_010_000), [], True),
        (line(12, 1_030_000), [], False),
        (line(12, 1_000_000, threads=2), [], False),
        (line(12, 1_000_000), ["17 python"], False),
    ],
    ids=["within 2%", "more memory", "a thread more", "a process left"],
)
def test_a_soak_holds_only_where_nothing_grew_after_ten_minutes_and_nothing_is_left(
    tmp_path, last, left, holds
):
    end = {"minute": 12, "end": True, "exit_code": 1, "processes_left": left}
    lines = [line(1, 500_000), line(10, 1_000_000), line(11, 1_005_000), last, end]
    (tmp_path / soak_page.SAMPLES).write_text("".join(json.dumps(each) + "\n" for each in lines))
    page, found = soak_page.page_of(tmp_path)
    assert found == holds
    assert ("The claim holds" in page) == holds
