# SPDX-License-Identifier: Apache-2.0
"""A folder that appears whole or not at all, and touches nothing that is there; light."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.files.whole import folder_beside
from data.files.writable import require_folder


def require_free(to: Path, room: float = 0) -> None:
    """Raise ValueError unless a folder can be made at `to`: nothing there, and room for it.

    `room` is in bytes; 0 where it is not known.
    """
    if os.path.islink(to):
        raise ValueError(f"--to {to} is a link; name a folder that is not there")
    if os.path.lexists(to):
        raise ValueError(f"--to {to} is there already; remove it, or name another folder")
    require_folder(to, "--to", room)


@contextmanager
def appearing(to: Path) -> Iterator[Path]:
    """Give an empty folder that is called `to` once the block is over, and is gone if it raises.

    It is filled beside `to` under a name that no one has, so two at a time do not meet. Raises
    ValueError where `to` is there or cannot be made.
    """
    require_free(to)
    with folder_beside(to) as part:
        yield part
        os.replace(part, to)
