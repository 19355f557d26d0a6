# SPDX-License-Identifier: Apache-2.0
"""The shipped recipes as nemo-run factories: one a row of `recipes.shipped.table`.

NeMo's own command, `nemo llm pretrain --factory NAME KEY=VALUE`, imports this module by the entry
point of the group `nemo_run.cli`. nemo-run takes any key where a class has `**kwargs`, as NeMo's
`MegatronStrategy`, which drops it in silence. So that command gets a context here that applies
overrides to a recipe of Longhaul's, and checks it, as `longhaul pretrain` does.
"""

from collections.abc import Callable
from typing import Any

import nemo_run as run
from nemo.collections import llm
from nemo_run.cli.api import RunContext

from recipes.nemo2.model import LongContextModel
from recipes.resolved.overrides import override
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


class CheckedContext(RunContext):
    """nemo-run's context of a command, for which Longhaul's recipes are checked."""

    def parse_fn(self, fn: Callable[..., Any], args: list[str], **given: Any) -> run.Partial:
        """Return the task of a factory or a file, with `KEY=VALUE` words applied.

        Raises ValueError for a recipe of Longhaul's that its checks refuse.
        """
        recipe = super().parse_fn(fn, [], **given)
        model = getattr(recipe, "model", None)
        if isinstance(model, run.Config) and model.__fn_or_cls__ is LongContextModel:
            return override(recipe, args)
        return super().parse_fn(fn, args, **given)


llm.pretrain.cli_entrypoint.run_ctx_cls = CheckedContext


def recipe_named(name: str) -> run.Partial:
    """Return the recipe of that name; raise ValueError with the nearest name for an unknown one."""
    return lookup("recipe", name, FACTORIES)()
