# SPDX-License-Identifier: Apache-2.0
"""Offset of each node's clock from rank 0's, by messages through the store.

A rank writes at t0, rank 0 answers with its time s, the rank reads at t1: its clock is ahead by
(t0 + t1) / 2 - s, with an error of at most (t1 - t0) / 2 (Cristian, 1989). The quickest of several
rounds counts.
"""

import time
from collections.abc import Iterable, Iterator
from statistics import median

from slurm.preflight.check import Group, PreflightCheck
from slurm.preflight.ranks.rendezvous import Meeting

TURNS = 5


def offset(meeting: Meeting, leaders: Iterable[int]) -> tuple[float, float]:
    """Return the seconds that this rank's clock is ahead of rank 0's, and their error bound.

    Every rank must call it with the same `leaders`, one a node; other ranks return zeros.
    """
    mine, found = meeting.rank.rank, [(0.0, 0.0)]
    others = [leader for leader in leaders if leader]
    if mine in others:
        found = [_asked(meeting, turn) for turn in range(TURNS)]
    elif mine == 0:
        for leader in others:
            for turn in range(TURNS):
                meeting.heard(f"asked/{turn}", leader)
                meeting.store.set(f"answered/{turn}/{leader}", repr(time.time()))
    return min(found, key=lambda one: one[1])


def _asked(meeting: Meeting, turn: int) -> tuple[float, float]:
    begun, before = time.time(), time.perf_counter()
    meeting.say(f"asked/{turn}", True)
    theirs = float(meeting.heard(f"answered/{turn}", meeting.rank.rank))
    took = time.perf_counter() - before
    return begun + took / 2 - theirs, took / 2


def clock_check(offsets: dict[str, tuple[float, float]], limit: float) -> Iterator[PreflightCheck]:
    """Yield the check of offsets and their errors by host, in seconds."""
    late = {host: ahead for host, (ahead, error) in offsets.items() if abs(ahead) - error > limit}
    if late:
        shown = ", ".join(
            f"{host} is {abs(ahead):.3g} s {'ahead' if ahead > 0 else 'behind'}"
            for host, ahead in late.items()
        )
        yield PreflightCheck.failure(
            Group.CLOCK, "clocks agree", f"{shown} of rank 0's node; at most {limit:g} s",
            "start chrony or ntpd there: logs, file times and Slurm's credentials depend on it",
            far_from_median(offsets, limit),
        )  # fmt: skip
        return
    worst = max((abs(ahead) for ahead, _ in offsets.values()), default=0.0)
    yield PreflightCheck.ok(Group.CLOCK, "clocks agree", f"within {worst:.3g} s of rank 0's node")


def far_from_median(offsets: dict[str, tuple[float, float]], limit: float) -> list[str]:
    """Return the hosts whose clock is wrong: rank 0's alone if that is the wrong one."""
    usual = median(ahead for ahead, _ in offsets.values())
    return [host for host, (ahead, error) in offsets.items() if abs(ahead - usual) - error > limit]
