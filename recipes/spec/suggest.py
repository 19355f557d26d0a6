# SPDX-License-Identifier: Apache-2.0
"""Names of the command line: what is meant, or the nearest names there are."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

Named = TypeVar("Named")
SHOWN = 3
MOST = 12
"""Names that a sentence lists."""
_CARDS = "longhaul recipes --cards"
LISTED_BY = {"recipe": "longhaul recipes", "card": _CARDS, "model card": _CARDS}
"""What lists the names of a kind, where a sentence has no room for them."""


def named(kind: str, name: str, there: Mapping[str, Named]) -> Named:
    """Return what has the name; raise ValueError with the nearest names, or where all are."""
    if name not in there:
        raise ValueError(f"no {kind} is called {name!r}; {hint(name, there, kind)}")
    return there[name]


def hint(name: str, there: Iterable[str], kind: str = "") -> str:
    """Return the names nearest to one, or what there is where none is near, to end a sentence."""
    names = list(there)
    alike = {one.casefold(): one for one in names}
    near = [alike[one] for one in difflib.get_close_matches(name.casefold(), alike, n=SHOWN)]
    if not near:
        if kind in LISTED_BY:
            return f"`{LISTED_BY[kind]}` lists the {len(names)} there are"
        return there_are(names)
    *most, last = near
    return f"did you mean {', '.join(most)} or {last}?" if most else f"did you mean {last}?"


def there_are(there: Iterable[str], kind: str = "") -> str:
    """Return the names as the end of a sentence; of many the first, and what lists the others."""
    names = list(there)
    if len(names) <= MOST + 1:
        return f"there are {', '.join(names)}"
    lister = f"; `{LISTED_BY[kind]}` lists them" if kind in LISTED_BY else ""
    return f"there are {', '.join(names[:MOST])} and {len(names) - MOST} more{lister}"
