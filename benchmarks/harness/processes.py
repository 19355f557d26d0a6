# SPDX-License-Identifier: Apache-2.0
"""Ending what a measurement has started."""

from collections.abc import Set
from contextlib import suppress

import psutil


def children_of(process: int) -> set[psutil.Process]:
    """Return all processes below one, by its number; none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return set(psutil.Process(process).children(recursive=True))
    return set()


def kill(processes: Set[psutil.Process]) -> None:
    """Kill processes, those that have ended left aside."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
