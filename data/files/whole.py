# SPDX-License-Identifier: Apache-2.0
"""Atomic writes: files and folders appear complete or not at all.

Each is written under a hidden name in its destination folder and renamed once it is complete. If
writing fails for any reason (an interrupt, a full disk), the hidden file or folder is removed, and
so are the folders created for it. An OSError of a full or read-only file system names the
destination: the one that Python raises has no path. A symbolic link stays a link: its target is
written.
"""

import errno
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
OF_WRITING = (*NO_ROOM, errno.EROFS, errno.EFBIG)
"""Errors of the file system, not of a name, that only writing raises; `write` names no path."""
OF_THE_PLACE = (*OF_WRITING, errno.EIO)
"""The same and a disk error, which `read` raises without a path too."""


def write_bytes(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file atomically; its folder is created if missing.

    With `durable` this also holds if the machine loses power: the content is on the disk before the
    file is renamed, and the name is on the disk when the call returns.
    """
    with replacing(path) as hidden, hidden.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        _sync_folder(link_target(path).parent)


def write_text(path: Path, content: str, *, durable: bool = False) -> None:
    """Write a UTF-8 text file atomically; see `write_bytes`."""
    write_bytes(path, content.encode(), durable=durable)


def _sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk, if the file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a hidden path to write a file to; the file is renamed to `path` when the block ends.

    A file at `path` is replaced at that moment. If the block raises, nothing has changed.
    """
    place = link_target(path)
    hidden = place.with_name(f".{place.name[:50]}.{os.getpid()}.tmp")
    made = missing_folders(place.parent)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        yield hidden
        hidden.replace(place)
    except BaseException as error:
        with suppress(OSError):
            hidden.unlink(missing_ok=True)
        remove_empty(made)
        name_place(error, path, hidden)
        raise


def link_target(path: Path) -> Path:
    """Return the final target of a symbolic link, existing or not; any other path unchanged."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else path


@contextmanager
def folder_beside(place: Path) -> Iterator[Path]:
    """Yield an empty hidden folder on the file system of `place`, to be renamed in the block.

    It is removed at the end if it still exists. Two processes never get the same one. SIGTERM, as
    `kill` and schedulers send it, ends the process by an exception, as an interrupt does.
    """
    hidden = place.with_name(f".{place.name[:50]}.partial-{secrets.token_hex(4)}")
    made = missing_folders(place.parent)
    try:
        with _ended_by_exception():
            hidden.mkdir(parents=True)
            yield hidden
    except BaseException as error:
        shutil.rmtree(hidden, ignore_errors=True)
        remove_empty(made)
        name_place(error, place, hidden)
        raise
    shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def _ended_by_exception() -> Iterator[None]:
    """Make SIGTERM raise SystemExit where it would end the process at once."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def missing_folders(folder: Path) -> list[Path]:
    """Return the folders of a path that do not exist, the innermost first."""
    folder = folder.absolute()
    return [path for path in (folder, *folder.parents) if not os.path.lexists(path)]


def remove_empty(folders: list[Path]) -> None:
    """Remove folders, the innermost first, up to the first that is not empty."""
    with suppress(OSError):
        for folder in folders:
            if os.path.lexists(folder):
                folder.rmdir()


def name_place(error: BaseException, place: Path, hidden: Path) -> None:
    """Set the path of OSErrors in a chain of exceptions to `place` if it is missing or `hidden`.

    A library that reports a failed write by its own error has the OSError as that error's context.
    """
    for link in chain(error):
        if not isinstance(link, OSError):
            continue
        named = str(link.filename or "")
        beneath = named == str(hidden) or named.startswith(f"{hidden}{os.sep}")
        if beneath or (not named and link.errno in OF_WRITING):
            link.filename, link.filename2 = str(place), None


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and the exceptions that it was raised from or while handling.

    They include the failures that `torch.distributed.checkpoint` collects from ranks.
    """
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        collected = getattr(link, "failures", None)
        if isinstance(collected, dict):
            waiting += [one[0] for _, one in sorted(collected.items()) if isinstance(one, tuple)]
        waiting += [one for one in (link.__cause__, link.__context__) if one is not None]
