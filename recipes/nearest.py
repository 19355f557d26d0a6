# SPDX-License-Identifier: Apache-2.0
"""Names of the command line: what is meant, or the nearest names there are."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

Named = TypeVar("Named")
SHOWN = 3


def named(kind: str, name: str, there: Mapping[str, Named]) -> Named:
    """Return what has the name; raise ValueError with the nearest names, or all, where none has."""
    if name not in there:
        raise ValueError(f"no {kind} is called {name!r}; {hint(name, there)}")
    return there[name]


def hint(name: str, there: Iterable[str]) -> str:
    """Return the names nearest to one, or all where none is near, as the end of a sentence."""
    names = list(there)
    near = difflib.get_close_matches(name, names, n=SHOWN)
    if not near:
        return f"there are {', '.join(names)}"
    *most, last = near
    return f"did you mean {', '.join(most)} or {last}?" if most else f"did you mean {last}?"
