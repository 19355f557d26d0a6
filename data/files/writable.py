# SPDX-License-Identifier: Apache-2.0
"""Checks that a command can write to its outputs, made before the work begins.

A path is tried by writing: an unnamed file is opened, filled a little and closed in the folder that
will hold the path, so nothing is left and nothing is replaced. Permissions alone are not enough:
root has them all, and a full disk has room for empty files.
"""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from data.files.whole import link_target

TRIED = 2**16
"""Bytes written to try a path: more than a full file system still takes."""
GIB = 2**30


def require_file(path: Path, what: str, suffixes: Sequence[str] = ()) -> None:
    """Raise ValueError unless a file can be written at `path`; an existing one will be replaced.

    For a symbolic link the target is tried, since `data.files.whole.replacing` writes the target.

    Args:
        what: the option or key that named it, such as `--out`; the message begins with it.
        suffixes: allowed suffixes of the name, such as `.json`; empty: any.
    """
    said = f"{what} {path}"
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"{said} is not a {' or '.join(suffixes)} file; name one")
    mode = _mode(path, said)
    if mode is not None and stat.S_ISDIR(mode):
        raise ValueError(f"{said} is a folder; name a file, as {path / f'name{_first(suffixes)}'}")
    if mode is not None and not stat.S_ISREG(mode):
        raise ValueError(f"{said} is a device or a pipe; name a file")
    _try(link_target(path).absolute().parent, said)


def require_folder(path: Path, what: str, room: float = 0, why: str = "") -> None:
    """Raise ValueError unless a folder can be created at `path`, or written to if it exists.

    Args:
        what: as for `require_file`.
        room: bytes that the file system must have free; 0: unknown.
        why: what the bytes are for.
    """
    said = f"{what} {path}"
    mode = _mode(path, said)
    if mode is not None and not stat.S_ISDIR(mode):
        raise ValueError(f"{said} is a file; expected a folder")
    _try(path.absolute(), said)
    if room > 0:
        free = shutil.disk_usage(existing(path)).free
        reasons = f" ({why})" if why else ""
        if free < room:
            raise ValueError(
                f"{said} needs about {_size(room)}{reasons} and its file system has {_size(free)} "
                "free; make room, or name a path on another file system"
            )


def existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    path = path.absolute()
    return next(above for above in (path, *path.parents) if above.exists())


def reason(error: OSError) -> str:
    """Return in a few words why a path cannot be used."""
    if error.errno == errno.EROFS:
        return "the file system is read-only"
    if error.errno == errno.ENOSPC:
        return "the file system is full"
    if error.errno == errno.EDQUOT:
        return "the quota is used up"
    return (error.strerror or str(error)).lower()


def _mode(path: Path, said: str) -> int | None:
    """Return the mode of a path, following links; None if it or the link's target is missing."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (
        OSError
    ) as error:  # too long a name, circular links, a folder without permission to enter
        raise ValueError(f"{said} cannot be written ({reason(error)}); name another") from None


def _try(folder: Path, said: str) -> None:
    try:
        above = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        if not above.is_dir():
            raise ValueError(
                f"{said} cannot be written ({above} is not a folder); name another place"
            )
        with tempfile.TemporaryFile(dir=above, prefix=".longhaul-") as file:
            file.write(bytes(TRIED))
            file.flush()
    except OSError as error:
        raise ValueError(
            f"{said} cannot be written ({reason(error)}); name another place"
        ) from None


def _first(suffixes: Sequence[str]) -> str:
    return suffixes[0] if suffixes else ""


def _size(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"
