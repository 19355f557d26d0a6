# SPDX-License-Identifier: Apache-2.0
"""Look up names of the command line and suggest the nearest ones."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

Named = TypeVar("Named")
SHOWN, SHORTEST = 3, 4
"""Names that are suggested, and letters of a part of a name that is looked for in them."""
MOST = 12
"""Most names that a message lists."""
_CARDS = "longhaul recipes --cards"
LISTED_BY = {"recipe": "longhaul recipes", "card": _CARDS, "model card": _CARDS}
"""Command that lists the names of a kind when there are more."""


def lookup(kind: str, name: str, there: Mapping[str, Named]) -> Named:
    """Return the object of that name; raise ValueError with the nearest names, or the command."""
    if name not in there:
        raise ValueError(f"no {kind} is called {name!r}; {did_you_mean(name, there, kind)}")
    return there[name]


def did_you_mean(name: str, there: Iterable[str], kind: str = "") -> str:
    """Return the end of a message: the names nearest to `name`, or all if none is near."""
    names = list(there)
    alike = {one.casefold(): one for one in names}
    near = [alike[one] for one in difflib.get_close_matches(name.casefold(), alike, n=SHOWN)]
    if not near and len(name) >= SHORTEST:
        near = [alike[one] for one in alike if name.casefold() in one][:SHOWN]
    if not near:
        if kind in LISTED_BY:
            return f"`{LISTED_BY[kind]}` lists the {len(names)} there are"
        return list_of(names)
    *most, last = near
    return f"did you mean {', '.join(most)} or {last}?" if most else f"did you mean {last}?"


def list_of(there: Iterable[str], kind: str = "") -> str:
    """Return the end of a message: the names, or the first ones and the command that lists all."""
    names = list(there)
    if len(names) <= MOST + 1:
        return f"there are {', '.join(names)}"
    lister = f"; `{LISTED_BY[kind]}` lists them" if kind in LISTED_BY else ""
    return f"there are {', '.join(names[:MOST])} and {len(names) - MOST} more{lister}"
