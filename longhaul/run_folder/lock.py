# SPDX-License-Identifier: Apache-2.0
"""One process at a time writes into a folder; the second is told who the first is; light.

The lock is the kernel's (`flock`) on a file in the folder, so it ends with the process that holds
it, however that ends; on a network file system it holds between machines. The file says who holds
it: host, process, command and start. Where a file system has no locks, the process that made the
file holds the folder as long as it runs; only processes of this machine are told apart there.

A job of a scheduler does not take this lock: the ranks of a stage have one of their own
(`metrics.lock` of `custom_modules.callbacks.step_log`), which is looked at here as well.
"""

import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from data.files.whole import missing_folders, remove_empty

FILE = "in_use.lock"
OF_RANKS = "metrics.lock"
"""In a stage's folder; the rank that trains it holds it."""
TRIES, PAUSE = 5, 0.1
"""Of a lock that is held: another process may only be looking who holds it. Seconds between."""


class InUseError(ValueError):
    """Report the process that writes into a folder already."""


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if it is not there.

    Raises InUseError where another process holds it, or ranks still train into the folder. A
    folder that is made and left empty is removed again.
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
    """Raise InUseError where another process writes into the folder; nothing is locked."""
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
    """Return a descriptor of a file, and whether this process has made it."""
    if not made:
        return os.open(path, os.O_RDWR), False
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
    except FileExistsError:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644), False


def _lock(descriptor: int, path: Path) -> bool:
    """Lock a file and return True; False where its file system has no locks."""
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
    """Raise InUseError where the file names a process of this machine that runs.

    One that has made the file writes its record next, so that is waited for a little.
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
        "command": shlex.join(["longhaul", *sys.argv[1:]]),
        "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def record_of(path: Path) -> dict[str, Any]:
    """Return what a lock's file says of its holder, empty where that cannot be read."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _sentence(path: Path) -> str:
    holder = record_of(path)
    if "process" not in holder:
        return f"another process writes into {path.parent} ({path.name} is locked); wait for it"
    return (
        f"{path.parent} is in use by process {holder['process']} on {holder.get('host')} "
        f"({holder.get('command')}, since {holder.get('since')}); wait for it, or end it there "
        f"with `kill {holder['process']}`"
    )
