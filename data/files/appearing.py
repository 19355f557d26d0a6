# SPDX-License-Identifier: Apache-2.0
"""Atomic creation of a folder; nothing that exists is touched, unless the caller replaces it."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.files.whole import folder_beside
from data.files.writable import require_folder


def require_free(to: Path, room: float = 0, *, what: str = "--to") -> None:
    """Raise ValueError unless a folder can be created at `to`: the path is free, with enough room.

    `room` is in bytes; 0 if unknown. `what` is the option that named the path.
    """
    if os.path.islink(to):
        raise ValueError(f"{what} {to} is a link; name a folder that does not exist")
    if os.path.lexists(to):
        raise ValueError(f"{what} {to} already exists; remove it, or name another folder")
    require_folder(to, what, room)


@contextmanager
def appearing(to: Path, *, what: str = "--to") -> Iterator[Path]:
    """Yield an empty folder, renamed to `to` when the block ends and removed if it raises.

    It lies next to `to` under a unique name, so concurrent calls do not collide. Raises ValueError
    if `to` exists or cannot be created.
    """
    require_free(to, what=what)
    with folder_beside(to) as part:
        yield part
        os.replace(part, to)


def replace_folder(new: Path, place: Path, old: Path | None = None) -> None:
    """Rename a complete folder to `place`; a folder that is there is removed after that.

    It is renamed to `old` meanwhile, by default a hidden name next to it, and back if an error or
    an interrupt comes in between.
    """
    if not os.path.lexists(place):
        new.rename(place)
        return
    aside = old or place.with_name(f".{place.name[:50]}.old-{secrets.token_hex(4)}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        place.rename(aside)
        new.rename(place)
    except BaseException:
        if aside.exists() and not place.exists():
            aside.rename(place)
        raise
    shutil.rmtree(aside, ignore_errors=True)
