# SPDX-License-Identifier: Apache-2.0
"""How the command line reports an error: one sentence and an exit code, or a traceback; light.

A sentence is for errors that a user can fix: a wrong word or file (`ValueError`), and whatever the
system refused (`OSError`: a full disk, a read-only folder, a file where a folder is meant).
Anything else is a bug of the program and keeps its traceback.
"""

import errno
import os
import sys
from contextlib import suppress
from typing import NamedTuple

from data.files.whole import OF_THE_PLACE, chain

WRONG, FAILED, INTERRUPTED = 2, 1, 130
"""Exit codes: a user's error, a failure, Ctrl-C."""
_OF_NAMES = {
    errno.ENOENT: "there is no such file or folder; check the spelling",
    errno.EACCES: "permission denied; name another place, or ask for the permission",
    errno.EPERM: "the operation is not permitted; name another place",
    errno.EISDIR: "it is a folder, and a file is meant",
    errno.ENOTDIR: "a part of it is a file, and a folder is meant",
    errno.EEXIST: "it already exists; name another place, or remove it",
    errno.ENOTEMPTY: "the folder is not empty; name another place",
    errno.ENAMETOOLONG: "the name is too long; take one of at most 255 bytes a part",
    errno.ELOOP: "its links form a loop",
    errno.EROFS: "the file system is read-only; name another place",
    errno.ETXTBSY: "it is a running program",
}
_OF_MACHINES = {
    errno.ENOSPC: "the file system is full; make room, or name a place on another",
    errno.EDQUOT: "the quota is used up; make room, or name a place on another",
    errno.EFBIG: "the file would be larger than its file system or `ulimit -f` admits",
    errno.EMFILE: "too many open files; raise the limit with `ulimit -n`",
    errno.EIO: "the file system reports an input/output error; look at the disk or the mount",
    errno.ENOMEM: "there is not enough memory",
}


_INTERRUPTED = "interrupted; nothing of this command is still running"
_PRINTING = ("longhaul.cli", "__main__")
"""Modules of Longhaul that print by themselves."""


class Answer(NamedTuple):
    """The sentence that reports an error, and the exit code."""

    sentence: str
    code: int


def answer(error: BaseException) -> Answer | None:
    """Return the answer to an error; None for one that needs its traceback.

    A library's own error is reported as the OSError that caused it, if that is of a file system:
    torch reports a write to a full disk as `unexpected pos`.
    """
    if isinstance(error, KeyboardInterrupt):
        return Answer(_INTERRUPTED, INTERRUPTED)
    if isinstance(error, OSError):
        return _of_system(error)
    if isinstance(error, ValueError):
        return Answer(f"error: {error}", WRONG)
    for link in chain(error):
        if isinstance(link, KeyboardInterrupt):
            return Answer(_INTERRUPTED, INTERRUPTED)
        if isinstance(link, OSError) and link.errno in OF_THE_PLACE:
            return _of_system(link)
    if isinstance(error, RuntimeError) and type(error).__module__ == "slurm.experiment":
        return Answer(f"error: {error}", FAILED)
    return None


def _of_system(error: OSError) -> Answer:
    where = str(error.filename) if error.filename is not None else ""
    if error.errno in _OF_NAMES:
        said, code = _OF_NAMES[error.errno], WRONG
    else:
        said, code = _OF_MACHINES.get(error.errno or 0, error.strerror or str(error)), FAILED
    if not where and _is_of_printing(error):
        _let_go_of_stdout()
        where = "standard output"
    return Answer(f"error: {where}: {said}" if where else f"error: {said}", code)


def _is_of_printing(error: OSError) -> bool:
    """Return whether an error was raised by printing; standard output has no path to name."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    room = "" if last is None else str(last.tb_frame.f_globals.get("__name__", ""))
    return room.partition(".")[0] in ("rich", "typer", "click") or room in _PRINTING


def _let_go_of_stdout() -> None:
    """Discard what is still to be printed, or Python would fail on it again at its end."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError):  # it is not a file, or is closed
        os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
