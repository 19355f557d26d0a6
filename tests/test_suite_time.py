# SPDX-License-Identifier: Apache-2.0
"""The report of the suite's time, and the order of its files."""

import re
import subprocess
import sys
import time
from types import SimpleNamespace

from tests import suite_time
from tests.house.rooms import TREE

SECONDS = {"tests/b.py": 700.0, "tests/a.py": 300.0, "tests/c.py": 2.0}


def test_a_total_within_the_budget_is_said_with_the_slowest_files():
    lines = suite_time.page(SECONDS, {}, total=600, budget=1500)
    assert lines == [
        "   700 s  tests/b.py", "   300 s  tests/a.py", "     2 s  tests/c.py",
        "10.0 min of CPU in all, of a budget of 25 min",
    ]  # fmt: skip


def test_an_overrun_names_the_files_that_took_more_than_recorded():
    recorded = {"tests/b.py": 710.0, "tests/a.py": 100.0}
    last = suite_time.page(SECONDS, recorded, total=1800, budget=1500)[-1]
    assert last == (
        "30.0 min of CPU in all: 5.0 min over the budget of 25 min; more than recorded: "
        "tests/a.py 300 s (100), tests/c.py 2 s (0)"
    )


def test_a_file_s_seconds_are_those_of_all_its_tests_with_their_setups_and_forked_processes():
    reports = [
        SimpleNamespace(nodeid="tests/a.py::one", cpu=1.0),
        SimpleNamespace(nodeid="tests/b.py::two[x::y]", cpu=5.0),
        SimpleNamespace(nodeid="tests/a.py::one", cpu=2.5),
        SimpleNamespace(nodeid="tests/a.py"),
    ]
    forked = [("tests/a.py::one (call)", 4.0), ("tests/warm_start/server.py", 0.5)]
    assert suite_time.by_file(reports, forked) == {
        "tests/a.py": 7.5, "tests/b.py": 5.0, "tests/warm_start/server.py": 0.5,
    }  # fmt: skip


def test_a_meter_counts_what_this_process_and_those_it_waited_for_computed():
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    meter = suite_time.Meter()
    time.sleep(0.3)
    assert meter.lap() < 0.2
    subprocess.run([sys.executable, "-S", "-c", busy], check=True)
    assert meter.lap() > 0.4


def test_the_longest_begin_and_slow_files_without_a_record_come_before_quick_ones():
    def item(nodeid: str, slow: bool = False):
        return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda _: slow or None)

    items = [
        item("tests/quick.py::a"), item("tests/new.py::b", slow=True), item("tests/long.py::c"),
        item("tests/slurm/test_chain.py::d"), item("tests/slurm/test_nemo_run.py::e"),
    ]  # fmt: skip
    recorded = {
        "tests/long.py": 500.0, "tests/slurm/test_chain.py": 480.0,
        "tests/slurm/test_nemo_run.py": 50.0,
    }  # fmt: skip
    suite_time.longest_first(items, recorded)
    assert [one.nodeid.rpartition("::")[2] for one in items] == ["d", "e", "c", "b", "a"]


def test_the_tests_of_files_that_take_long_are_slow():
    marked = []
    items = [
        SimpleNamespace(nodeid=name, add_marker=lambda mark, name=name: marked.append((name, mark)))
        for name in ("tests/quick.py::a", "tests/long.py::b", "tests/long.py::c")
    ]
    suite_time.mark_slow(items, {"tests/long.py": 5})
    assert marked == [("tests/long.py::b", "slow"), ("tests/long.py::c", "slow")]


def test_every_file_that_needs_slurm_shares_it():
    using = {
        path.relative_to(TREE).as_posix()
        for path in TREE.glob("tests/slurm/test_*.py")  # where the fixture is
        if re.search(r"^def \w+\([^)]*\bslurm\b", path.read_text(), re.MULTILINE)
    }
    assert using == suite_time.NEED_SLURM
    assert {suite_time.scope(file) for file in using} == {suite_time.SLURM}


def test_recorded_files_are_there():
    assert [file for file in suite_time.read() if not (TREE / file).exists()] == []
