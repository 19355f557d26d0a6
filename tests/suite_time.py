# SPDX-License-Identifier: Apache-2.0
"""The suite's time: which files begin first, which stay on one worker, and the report at the end.

What counts is CPU time, user and system: how long the suite takes depends on what else a machine
does. A test's is that of its worker, of the processes that it started and waited for, and of those
that the warm-start server forked for it.

`durations.json` has the seconds of each file that takes five or more, with setups and teardowns, as
`make durations` measured them. Files are started longest first, so that no worker is left with one
when the others have ended. Files that need the real Slurm share it on one worker and are the first.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

RECORD = Path(__file__).parent / "durations.json"
RECORDED_SECONDS = 5
SHOWN = 25
SLURM = "tests/slurm (the real Slurm)"
NEED_SLURM = frozenset(
    f"tests/slurm/test_{name}.py"
    for name in (
        "chain",
        "batch_script",
        "dgx_page",
        "nemo_run",
        "other_suites",
        "prepare_array",
        "prepare_chain",
        "quoting",
        "real_slurm",
        "scripts",
    )
)


def scope(file: str) -> str:
    """Return what a file shares a worker with: its own name, but for files that need Slurm."""
    return SLURM if file in NEED_SLURM else file


class Scheduling(LoadFileScheduling):
    """Give a worker a whole file at a time, and one worker all files that need Slurm."""

    def _split_scope(self, nodeid: str) -> str:
        return scope(file_of(nodeid))


def leave_out_nightly(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked `nightly`; pytest counts them as deselected."""
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    if nightly:
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]


def mark_slow(items: list[pytest.Item], recorded: dict[str, float]) -> None:
    """Mark the tests of the recorded files `slow`, as those that say so themselves."""
    for item in items:
        if file_of(item.nodeid) in recorded:
            item.add_marker("slow")


def longest_first(items: list[pytest.Item], recorded: dict[str, float]) -> None:
    """Sort tests by the recorded seconds of what shares their worker; slow ones without first."""
    slow = {file_of(item.nodeid) for item in items if item.get_closest_marker("slow")}
    seconds: dict[str, float] = defaultdict(float)
    for file in {file_of(item.nodeid) for item in items}:
        seconds[scope(file)] += recorded.get(file, 100.0 if file in slow else 0.0)

    def order(item: pytest.Item) -> tuple[bool, float, float]:
        file = file_of(item.nodeid)
        return scope(file) != SLURM, -seconds[scope(file)], -recorded.get(file, 0.0)

    items.sort(key=order)


def file_of(nodeid: str) -> str:
    """Return a test's file as its name has it."""
    return nodeid.split("::", 1)[0]


def read() -> dict[str, float]:
    """Return the recorded seconds by file."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


class Meter:
    """CPU seconds of this process and of those that it has waited for."""

    def __init__(self) -> None:
        self._mark = self.total()

    @staticmethod
    def total() -> float:
        """Return them since this process began."""
        return sum(os.times()[:4])

    def lap(self) -> float:
        """Return them since the last call."""
        before, self._mark = self._mark, self.total()
        return self._mark - before


def by_file(reports: Iterable[Any], forked: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the CPU seconds of each file, setups and teardowns included, the longest first.

    `forked` has tests and the seconds of processes that the warm-start server forked for them.
    """
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        if hasattr(report, "cpu"):
            seconds[file_of(report.nodeid)] += report.cpu
    for test, took in forked:
        seconds[file_of(test)] += took
    return dict(sorted(seconds.items(), key=lambda pair: -pair[1]))


def write(seconds: dict[str, float]) -> None:
    """Record the seconds of files that take long."""
    kept = {file: round(took) for file, took in seconds.items() if took >= RECORDED_SECONDS}
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")


def page(
    seconds: dict[str, float], recorded: dict[str, float], total: float, budget: float | None
) -> list[str]:
    """Return the lines of the report: the slowest files, and the total against the budget.

    All in CPU seconds. Where the budget is overrun, the files that took most over their record.
    """
    slowest = list(seconds.items())[:SHOWN]
    lines = [f"{took:6.0f} s  {file}" for file, took in slowest]
    if budget is None:
        return [*lines, f"{total / 60:.1f} min of CPU in all"]
    if total <= budget:
        return [*lines, f"{total / 60:.1f} min of CPU in all, of a budget of {budget / 60:g} min"]
    over = {file: took - recorded.get(file, 0.0) for file, took in seconds.items()}
    longer = sorted((file for file in over if over[file] > 0), key=lambda file: -over[file])
    named = [f"{file} {seconds[file]:.0f} s ({recorded.get(file, 0):.0f})" for file in longer[:5]]
    return [
        *lines,
        f"{total / 60:.1f} min of CPU in all: {(total - budget) / 60:.1f} min over the budget of "
        f"{budget / 60:g} min; more than recorded: {', '.join(named) or 'none'}",
    ]
