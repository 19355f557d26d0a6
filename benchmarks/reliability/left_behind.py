# SPDX-License-Identifier: Apache-2.0
"""Resources of long-running processes, and those left behind by a command that has ended."""

import os
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (the system's folder of segments)
SYSTEM_V = {"semaphores": Path("/proc/sysvipc/sem"), "segments": Path("/proc/sysvipc/shm")}
MARK = "LONGHAUL_SOAK"
"""Environment variable that all processes of one command inherit."""


class Held(NamedTuple):
    """What one process holds at one moment."""

    resident: int
    """Bytes."""
    unshared: int
    """Bytes that no other process maps."""
    threads: int
    files: int
    sockets: int
    pipes: int
    children: int


def held(process: psutil.Process) -> Held:
    """Return what a process holds."""
    memory = process.memory_full_info()
    targets = []
    for entry in os.scandir(f"/proc/{process.pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            targets.append(os.readlink(entry.path))
    kinds = [target.partition(":")[0] for target in targets]
    sockets, pipes = kinds.count("socket"), kinds.count("pipe")
    return Held(
        resident=memory.rss,
        unshared=memory.uss,
        threads=process.num_threads(),
        files=len(targets) - sockets - pipes,
        sockets=sockets,
        pipes=pipes,
        children=len(process.children(recursive=True)),
    )


def over_a_minute(samples: Sequence[Held]) -> Held:
    """Return the medians of bytes and the smallest of counts: a save has more for a second."""
    columns = list(zip(*samples, strict=True))
    medians = [int(statistics.median(column)) for column in columns[:2]]
    return Held(*medians, *map(min, columns[2:]))


class Shared(NamedTuple):
    """Semaphores and segments of shared memory that have a name."""

    semaphores: frozenset[str]
    segments: frozenset[str]


def shared() -> Shared:
    """Return POSIX's and System V's."""
    names = os.listdir(SHARED_MEMORY)
    posix = {name for name in names if name.startswith("sem.")}
    found = {"semaphores": posix, "segments": set(names) - posix}
    for kind, table in SYSTEM_V.items():
        rows = table.read_text().splitlines()[1:]
        found[kind] |= {f"System V {row.split()[1]}" for row in rows}
    return Shared(frozenset(found["semaphores"]), frozenset(found["segments"]))


def marked(mark: str) -> list[psutil.Process]:
    """Return the running processes that inherited a mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (
                process.environ().get(MARK) == mark
                and process.status() != psutil.STATUS_ZOMBIE
                and process.pid != os.getpid()
            ):
                found.append(process)
    return found


def files_below(folders: Iterable[Path]) -> frozenset[str]:
    """Return every file, folder, socket and link below some folders."""
    return frozenset(
        str(path) for folder in folders if folder.exists() for path in folder.rglob("*")
    )


def ranks_below(process: psutil.Process) -> dict[str, psutil.Process]:
    """Return the ranks that a command started, and the agent between them and it."""
    below = process.children(recursive=True)
    found: dict[str, psutil.Process] = {}
    for each in below:
        with suppress(psutil.Error):
            rank = each.environ().get("RANK")
            above = each.parent()
            if rank is None or above is None or above.environ().get("RANK") is not None:
                continue
            found[f"rank {rank}"] = each
            if above.pid != process.pid:
                found["agent"] = above
    return found
