# SPDX-License-Identifier: Apache-2.0
"""The shipped recipes as nemo-run factories: one a row of `recipes.shipped.table`."""

from collections.abc import Callable

import nemo_run as run
from nemo.collections import llm

from recipes.shipped.row import Row
from recipes.shipped.table import ROWS
from recipes.spec.suggest import lookup


def _factory(row: Row) -> Callable[..., run.Partial]:
    """Return a row's recipe as a function of the nodes, listed for nemo-run's command line."""

    def recipe(nodes: int = row.nodes) -> run.Partial:
        return row(nodes)

    recipe.__name__ = recipe.__qualname__ = row.name
    recipe.__doc__ = f"{row.card.name} at {row.seq_length:,} tokens, ladder {row.ladder.name}."
    factory: Callable[..., run.Partial] = run.cli.factory(target=llm.pretrain)(recipe)
    return factory


FACTORIES: dict[str, Callable[..., run.Partial]] = {
    name: _factory(row) for name, row in ROWS.items()
}


def recipe_named(name: str) -> run.Partial:
    """Return the recipe of that name; raise ValueError with the nearest name for an unknown one."""
    return lookup("recipe", name, FACTORIES)()
