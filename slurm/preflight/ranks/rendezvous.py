# SPDX-License-Identifier: Apache-2.0
"""Rendezvous of the ranks before torch.distributed: a store in which each announces itself.

Ranks of torchrun use the store of its agent. Otherwise rank 0 hosts the store at the port that the
job's own groups will use, until the process ends: torch lets stores of one process share a port
(`multi_tenant`), so NeMo reuses this store, and no rank can connect to a server that is closing.
All keys have preflight's prefix, so they do not collide with those of the job.
"""

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from slurm.preflight.check import Group, PreflightCheck, PreflightError
from slurm.preflight.machine import Rank
from slurm.preflight.node.network import port_failure, unreachable

PREFIX = "longhaul_preflight"
UNUSUAL_SECONDS = 10.0
"""Seconds after which a rank reports what it waits for."""
_kept: list[TCPStore] = []
"""Store servers of this process, which end with it."""
_meetings = itertools.count()
"""Counts the meetings of this process: each has its own keys."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The ranks of a job, and the store in which they write to each other; values are JSON."""

    rank: Rank
    store: Store
    seconds: float
    """Seconds that a rank waits for a value of another."""
    prefix: str = ""
    """What the keys of this meeting begin with in the job's store."""

    def say(self, key: str, value: Any) -> None:
        """Write under a key of this rank."""
        self.store.set(f"{key}/{self.rank.rank}", json.dumps(value))

    def heard(self, key: str, rank: int) -> Any:
        """Wait for the value that a rank writes under a key, and return it."""
        self.store.wait([f"{key}/{rank}"], timedelta(seconds=self.seconds))
        return json.loads(self.store.get(f"{key}/{rank}"))

    def all(self, key: str, value: Any) -> list[Any]:
        """Write a value; return those of all ranks on rank 0, nothing on others."""
        self.say(key, value)
        return self.gathered(key)

    def gathered(self, key: str) -> list[Any]:
        """Return what all ranks write under a key on rank 0, nothing on others."""
        if self.rank.rank:
            return []
        return [self.heard(key, rank) for rank in range(self.rank.world_size)]

    def has_said(self, key: str) -> bool:
        """Whether this rank has written under a key."""
        return bool(self.store.check([f"{key}/{self.rank.rank}"]))

    def decided(self, key: str, value: Any) -> Any:
        """Return rank 0's `value` on every rank."""
        if self.rank.rank == 0:
            self.say(key, value)
        return self.heard(key, 0)


def meet(rank: Rank, seconds: float) -> Meeting:
    """Return the store in which all ranks have announced themselves.

    Raises PreflightError if the port is unreachable, a rank exists twice, or some have not come
    within `seconds`.
    """
    hosts_store = rank.rank == 0 and not rank.agent
    if not hosts_store:
        with _said_later(f"rank {rank.rank} waits for {rank.address}:{rank.port}", seconds):
            why = unreachable(rank.address, rank.port, seconds)
        if why is not None:
            raise PreflightError([port_failure(rank.address, rank.port, why, rank.host)])
    try:
        whole = TCPStore(
            rank.address, rank.port, None, hosts_store, timedelta(seconds=seconds),
            wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
    except (RuntimeError, OSError) as error:  # torch's own errors derive from RuntimeError
        why = str(error).splitlines()[0]
        raise PreflightError([port_failure(rank.address, rank.port, why, rank.host)]) from error
    if hosts_store:
        _kept.append(whole)
    prefix = f"{PREFIX}/{rank.restarts}/{next(_meetings)}"
    store = PrefixStore(prefix, whole)
    meeting = Meeting(rank, store, seconds, prefix)
    if store.add(f"there/{rank.rank}", 1) > 1:
        raise PreflightError([_twice(rank)])
    meeting.say("place", {"host": rank.host, "world_size": rank.world_size})
    _wait_for_all(meeting)
    return meeting


def joined(rank: Rank, prefix: str, seconds: float) -> Meeting:
    """Return the meeting that this rank's parent process is in, in the store that is there.

    Raises RuntimeError of torch's store if it cannot be reached within `seconds`.
    """
    whole = TCPStore(
        rank.address, rank.port, None, False, timedelta(seconds=seconds), wait_for_workers=False
    )
    return Meeting(rank, PrefixStore(prefix, whole), seconds, prefix)


@contextmanager
def _said_later(what: str, seconds: float) -> Iterator[None]:
    """Write to stderr what the rank waits for, if it takes longer than ranks usually need."""
    said = f"preflight: {what}, up to {seconds:g} s\n"
    with unless_done(UNUSUAL_SECONDS, lambda: sys.stderr.write(said)):
        yield


@contextmanager
def unless_done(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Call a function in another thread if the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _twice(rank: Rank) -> PreflightCheck:
    return PreflightCheck.failure(
        Group.RANKS, "ranks", f"two processes are rank {rank.rank}, one of them on {rank.host}",
        "start each rank once, with a RANK of its own (srun sets SLURM_PROCID, torchrun RANK)",
    )  # fmt: skip


def _wait_for_all(meeting: Meeting) -> None:
    """Wait until every rank has come; raise PreflightError with those that have not."""
    size, store = meeting.rank.world_size, meeting.store
    if store.add("arrived", 1) == size:
        store.set("complete", "yes")
    with suppress(RuntimeError):  # the store's timeout
        store.wait(["complete"], timedelta(seconds=meeting.seconds))
    absent = [rank for rank in range(size) if not store.check([f"place/{rank}"])]
    if not absent:
        return
    there = {meeting.heard("place", rank)["host"] for rank in range(size) if rank not in absent}
    if meeting.rank.rank == 0:
        store.set("complete", "no")  # others need not wait for their own timeout
        time.sleep(1)  # this process may host the store, and they must read from it
    shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    failure = PreflightCheck.failure(
        Group.RANKS, "ranks",
        f"{size - len(absent)} of {size} ranks came in {meeting.seconds:g} s, from "
        f"{', '.join(sorted(there))}; not there: {shown}",
        "look at the output of those ranks, and whether the launcher starts as many as it says",
    )  # fmt: skip
    raise PreflightError([failure])
