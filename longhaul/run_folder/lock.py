# SPDX-License-Identifier: Apache-2.0
"""Lock of a folder that only one process at a time may write into; light.

The lock is the kernel's (`flock`) on a file in the folder, so it ends with the process that holds
it, however that ends; on a network file system it works between machines. The file names the
holder: host, process, command and start. On a file system without locks, the process that created
the file holds the folder as long as it runs; only processes of this machine are recognized there.
A killed process leaves the file behind; whether one of another machine was killed cannot be seen.

A job of a scheduler does not take this lock: the ranks of a stage have one of their own
(`metrics.lock` of `custom_modules.callbacks.step_log`), which is checked here as well.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from data.files.json_object import json_object
from data.files.whole import missing_folders, remove_empty
from longhaul.terminal.typed_command import typed_command

FILE = "in_use.lock"
OF_RANKS = "metrics.lock"
"""In a stage's folder; held by the rank that trains the stage."""
TRIES, PAUSE = 5, 0.1
"""Attempts at a held lock, which another process may only be inspecting; seconds between them."""


CLOCK_SECONDS = 5.0
"""How much later than its lock a process may seem to have started: both times are rounded."""


class InUseError(ValueError):
    """Another process already writes into the folder."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that writes into a folder, as its file records it."""

    host: str
    process: int
    command: str
    since: str

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine."""
        return self.host == socket.gethostname()

    @property
    def runs(self) -> bool:
        """Whether it runs on this machine, and is not a later one with the same number."""
        import psutil

        try:
            started = psutil.Process(self.process).create_time()
            since = datetime.fromisoformat(self.since).timestamp() if self.since else started
        except (ValueError, psutil.Error):
            return False
        return self.is_here and self.process > 0 and bool(started <= since + CLOCK_SECONDS)

    @property
    def words(self) -> str:
        """The holder in a sentence."""
        since = f", since {self.since}" if self.since else ""
        words = f"in use by process {self.process} on {self.host} ({self.command}{since})"
        return words if self.is_here else f"{words}; this machine cannot see whether it still runs"


def holder_of(folder: Path) -> Holder | None:
    """Return the process that holds a folder; None if none does, or it is known to have ended.

    A killed process of another machine is assumed to hold it still.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    holder = _recorded(path) or Holder(
        host=socket.gethostname(), process=0, command="a command of longhaul", since=""
    )
    return holder if not holder.is_here or is_locked(path) or holder.runs else None


def is_locked(path: Path) -> bool:
    """Return whether another process holds a file locked.

    A process that is starting tries several times, so that this look does not stop it.
    """
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # it is gone, or a file system without locks
    return False


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created if it does not exist.

    Raises InUseError if another process holds it, or ranks still train into the folder. A folder
    that is created and left empty is removed again.
    """
    require_unused(folder)
    made = missing_folders(folder)
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path)
    except BaseException:
        remove_empty(made)
        raise
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_this_process(), indent=1).encode(), 0)
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)
        remove_empty(made)


def require_unused(folder: Path) -> None:
    """Raise InUseError if another process writes into the folder; lock nothing."""
    for name in (FILE, OF_RANKS):
        if (folder / name).is_file():
            with suppress(FileNotFoundError):
                os.close(_locked(folder / name, made=False))


def _locked(path: Path, *, made: bool = True) -> int:
    """Return the descriptor of a file that this process has locked."""
    while True:
        descriptor, new = _opened(path, made=made)
        try:
            if _lock(descriptor, path):
                if _is_there(descriptor, path):
                    return descriptor
            elif new:
                return descriptor
            else:
                _require_ended(path)
                if not made:
                    return descriptor
                if _is_there(descriptor, path):
                    path.unlink(missing_ok=True)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has ended, and it was removed


def _opened(path: Path, *, made: bool) -> tuple[int, bool]:
    """Return a descriptor of a file, and whether this process has created it."""
    if not made:
        return os.open(path, os.O_RDWR), False
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
    except FileExistsError:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644), False


def _lock(descriptor: int, path: Path) -> bool:
    """Lock a file and return True; return False if its file system has no locks."""
    left = TRIES
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            left -= 1
            if not left:
                raise InUseError(_sentence(path)) from None
        time.sleep(PAUSE)


def _require_ended(path: Path) -> None:
    """Raise InUseError if the file names another running process of this machine.

    The process that creates the file writes its record next, so a missing one is waited for.
    """
    import psutil

    for _ in range(TRIES):
        if holder := _recorded(path):
            break
        time.sleep(PAUSE)
    # Not `runs`: a clock that was set since must not give the folder to a second process.
    others = holder is not None and holder.process not in (0, os.getpid())
    if holder is not None and others and holder.is_here and psutil.pid_exists(holder.process):
        raise InUseError(_sentence(path))


def _is_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "command": typed_command(),
        "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _recorded(path: Path) -> Holder | None:
    """Return the holder that a lock's file names; None if it cannot be read."""
    record = json_object(path)
    if not isinstance(record.get("process"), int):
        return None
    return Holder(
        host=str(record.get("host", socket.gethostname())),
        process=record["process"],
        command=str(record.get("command", "a command of longhaul")),
        since=str(record.get("since", "")),
    )


def _sentence(path: Path) -> str:
    holder = _recorded(path)
    if holder is None:
        return f"another process writes into {path.parent} ({path.name} is locked); wait for it"
    since = f", since {holder.since}" if holder.since else ""
    return (
        f"{path.parent} is in use by process {holder.process} on {holder.host} "
        f"({holder.command}{since}); wait for it, or end it there with `kill {holder.process}`"
    )
