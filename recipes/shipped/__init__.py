# SPDX-License-Identifier: Apache-2.0
"""The shipped recipes, importable by name.

    from recipes.shipped import llama31_8b_ultralong_1m
    recipe = llama31_8b_ultralong_1m(nodes=4)

A name is a row of `recipes.shipped.table`, which imports neither torch nor NeMo; a call of the row
imports NeMo and returns a `nemo_run.Partial`. The table is read when a name is asked for.
"""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipes.shipped.row import Row


def __getattr__(name: str) -> "Row":
    """Return a row by its name; refuse another name with the nearest ones there are."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from recipes.shipped.table import ROWS
    from recipes.spec.suggest import did_you_mean

    if name in ROWS:
        return ROWS[name]
    message = f"no recipe is called {name!r}; {did_you_mean(name, ROWS, 'recipe')}"
    # `from recipes.shipped import name` drops the message of an AttributeError, so that it gets
    # an ImportError. Of a submodule it asks for an attribute too, before it imports that.
    importing = sys._getframe(1).f_code.co_name == "_handle_fromlist"
    if importing and find_spec(f"{__name__}.{name}") is None:
        raise ImportError(message, name=__name__)
    raise AttributeError(message, name=name, obj=None)  # given one, Python adds its own hint


def __dir__() -> list[str]:
    """Return the module's names with those of the recipes."""
    from recipes.shipped.table import ROWS

    return sorted({*globals(), *ROWS})
