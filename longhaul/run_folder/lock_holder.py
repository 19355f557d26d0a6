# SPDX-License-Identifier: Apache-2.0
"""The process that writes into a folder, read from `in_use.lock` without locking it; light.

On this machine the kernel knows whether a lock is held, and the process table whether its holder
still runs. Of another machine's process only the file is visible: it is removed when the process
ends by itself, and left behind if the process was killed.
"""

import os
import socket
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from longhaul.run_folder.lock import FILE, record_of

LOCKS = Path("/proc/locks")
CLOCK_SECONDS = 5.0
"""How much later than its lock a process may seem to have started: both times are rounded."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that writes into a folder, as its file records it."""

    host: str
    process: int
    command: str
    since: str
    is_here: bool
    """Whether it is a process of this machine, and so known to run."""

    @property
    def words(self) -> str:
        """The holder in a sentence."""
        said = f"in use by process {self.process} on {self.host} ({self.command}"
        said += f", since {self.since})" if self.since else ")"
        return said if self.is_here else f"{said}; this machine cannot see whether it still runs"


def holder_of(folder: Path) -> Holder | None:
    """Return the process that holds a folder; None if none does, or it is known to have ended.

    A killed process of another machine is assumed to hold it still.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    said, here = record_of(path), socket.gethostname()
    process = said.get("process")
    holder = Holder(
        host=str(said.get("host", here)),
        process=process if isinstance(process, int) else 0,
        command=str(said.get("command", "a command of longhaul")),
        since=str(said.get("since", "")),
        is_here=said.get("host", here) == here,
    )
    return holder if not holder.is_here or is_locked(path) or _runs(holder) else None


def is_locked(path: Path) -> bool:
    """Return whether a process of this machine holds a file locked.

    Reads the kernel's list, since trying the lock could block a process that is starting.
    """
    try:
        there, lines = path.stat(), LOCKS.read_text().splitlines()
    except OSError:
        return False
    place = f"{os.major(there.st_dev):02x}:{os.minor(there.st_dev):02x}:{there.st_ino}"
    return any(place in line.split() for line in lines if " FLOCK " in line)


def _runs(holder: Holder) -> bool:
    """Return whether the process of a holder runs, and is not a later one with the same number."""
    import psutil

    try:
        since = datetime.fromisoformat(holder.since).timestamp()
        started = psutil.Process(holder.process).create_time()
    except (ValueError, psutil.Error):
        return False
    return holder.process > 0 and bool(started <= since + CLOCK_SECONDS)
