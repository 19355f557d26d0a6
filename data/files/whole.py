# SPDX-License-Identifier: Apache-2.0
"""Files and folders that appear whole or not at all; light.

Each is filled under a hidden name in the folder where it will be, and renamed once it is complete.
Where filling it fails for any reason (an interrupt, a full disk), the hidden file or folder is
removed, and so are the folders that were made for it. An OSError of a full or a read-only file
system names the path that was to be written: the one that Python raises has no path at all. A file
that is a symbolic link stays one: what it points to is written.
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
"""Errors of a file system, not of a name, that reading does not bring: `write` names no path."""
OF_THE_PLACE = (*OF_WRITING, errno.EIO)
"""The same, and an error of the disk, which `read` raises without a path too."""


def write_bytes(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file whole or not at all; its folder is made where it is not there.

    With `durable` that also holds for a machine that loses power: the content is on the disk before
    the file has its name, and the name is when this returns.
    """
    with replacing(path) as hidden, hidden.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        _sync_folder(link_target(path).parent)


def write_text(path: Path, content: str, *, durable: bool = False) -> None:
    """Write a file of UTF-8 text whole or not at all; see `write_bytes`."""
    write_bytes(path, content.encode(), durable=durable)


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a hidden name to write a file under; the file is called `path` once the block ends.

    A file that is at `path` is replaced at that moment. If the block raises, nothing has changed.
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
    """Return what a symbolic link points to in the end, there or not; any other path as it is."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else path


@contextmanager
def folder_beside(place: Path) -> Iterator[Path]:
    """Give an empty hidden folder on the file system of `place`, to be renamed in the block.

    It is removed at the end if it is still there. Two processes never get the same one. SIGTERM, as
    `kill` and schedulers send it, ends the process as an interrupt does: by an exception.
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
    """Let SIGTERM raise SystemExit where it would end the process on the spot."""
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
    """Return the folders that `folder` lacks to be there, the inmost first."""
    folder = folder.absolute()
    return [path for path in (folder, *folder.parents) if not os.path.lexists(path)]


def remove_empty(folders: list[Path]) -> None:
    """Remove folders, the inmost first, up to the first that holds something."""
    with suppress(OSError):
        for folder in folders:
            if os.path.lexists(folder):
                folder.rmdir()


def name_place(error: BaseException, place: Path, hidden: Path) -> None:
    """Let the OSErrors of a chain of exceptions name `place` where they name nothing or `hidden`.

    A library that reports a failed write by an error of its own has the OSError as its context.
    """
    for link in chain(error):
        if not isinstance(link, OSError):
            continue
        named = str(link.filename or "")
        beneath = named == str(hidden) or named.startswith(f"{hidden}{os.sep}")
        if beneath or (not named and link.errno in OF_WRITING):
            link.filename, link.filename2 = str(place), None


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that it was raised from, or while handling.

    The failures that `torch.distributed.checkpoint` collects from ranks are among them.
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
