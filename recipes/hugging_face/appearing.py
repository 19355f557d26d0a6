# SPDX-License-Identifier: Apache-2.0
"""A folder that appears whole or not at all, and touches nothing that is there; light."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def require_free(to: Path) -> None:
    """Raise ValueError unless a folder can be made at `to`: nothing there, and no file above."""
    try:
        if to.is_symlink():
            raise ValueError(f"{to} is a link; name a folder that is not there with --to")
        if to.exists():
            raise ValueError(f"{to} is there already; remove it, or name another folder with --to")
        above = next(parent for parent in to.absolute().parents if os.path.lexists(parent))
        if not above.is_dir():
            raise ValueError(f"{to} cannot be made: {above} is no folder; name another with --to")
    except OSError as error:
        raise ValueError(f"{to} cannot be made ({error}); name another with --to") from error


@contextmanager
def appearing(to: Path) -> Iterator[Path]:
    """Give an empty folder that is called `to` once the block is over, and is gone if it raises.

    It is filled beside `to` under a name that no one has, so two at a time do not meet. Raises
    ValueError where `to` is there or cannot be made.
    """
    require_free(to)
    made = [parent for parent in to.absolute().parents if not parent.exists()]
    beside: Path | None = None
    try:
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            beside = Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
            part = beside / to.name
            part.mkdir()  # with the permissions of any folder; mkdtemp's are the owner's alone
        except OSError as error:
            raise ValueError(f"{to} cannot be made ({error}); name another with --to") from error
        yield part
        os.replace(part, to)
    except BaseException:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)
        with suppress(OSError):  # what another has written into stays
            for parent in made:
                parent.rmdir()
        raise
    beside.rmdir()
