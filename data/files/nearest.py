# SPDX-License-Identifier: Apache-2.0
"""The path that was probably meant by one that does not exist."""

import difflib
from pathlib import Path


def near_path(path: Path) -> str:
    """Return ` (did you mean PATH?)`, a like name in the path's folder.

    Returns an empty string if no name is similar, or if the path exists.
    """
    try:
        there = [one.name for one in path.parent.iterdir()]
    except OSError:
        return ""
    if path.name in there:
        return ""
    near = difflib.get_close_matches(path.name, there, n=1, cutoff=0.7)
    return f" (did you mean {path.parent / near[0]}?)" if near else ""
