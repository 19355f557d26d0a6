# SPDX-License-Identifier: Apache-2.0
"""Lock of a folder that only one process at a time may write into; light.

The lock is the kernel's (`flock`) on a file in the folder, so it ends with the process that holds
it, however that ends; on a network file system it works between machines. The file names the
holder: host, process, command and start. On a file system without locks, the process that created
the file holds the folder as long as it runs; only processes of this machine are recognized there.

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


class InUseError(ValueError):
    """Another process already writes into the folder."""


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
    """Raise InUseError if the file names a running process of this machine.

    The process that creates the file writes its record next, so a missing one is waited for.
    """
    import psutil

    for _ in range(TRIES):
        if holder := record_of(path):
            break
        time.sleep(PAUSE)
    mine = holder.get("host") == socket.gethostname()
    number = holder.get("process")
    if mine and isinstance(number, int) and number != os.getpid() and psutil.pid_exists(number):
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


def record_of(path: Path) -> dict[str, Any]:
    """Return the holder recorded in a lock's file; empty if it cannot be read."""
    return json_object(path)


def _sentence(path: Path) -> str:
    holder = record_of(path)
    if "process" not in holder:
        return f"another process writes into {path.parent} ({path.name} is locked); wait for it"
    return (
        f"{path.parent} is in use by process {holder['process']} on {holder.get('host')} "
        f"({holder.get('command')}, since {holder.get('since')}); wait for it, or end it there "
        f"with `kill {holder['process']}`"
    )
