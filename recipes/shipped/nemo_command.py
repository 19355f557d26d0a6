# SPDX-License-Identifier: Apache-2.0
"""The shipped recipes in NeMo's own command: `nemo llm pretrain --factory NAME KEY=VALUE`.

`nemo` (`nemorun`) loads this module by the entry point of the group `nemo_run.cli`. Importing it
registers the recipes as factories of `llm.pretrain`, and gives that command a context that applies
overrides to a recipe of Longhaul's, and checks it, as `longhaul pretrain` does. nemo-run by itself
takes any name where a class has `**kwargs`, as NeMo's `MegatronStrategy`, and drops it in silence.
"""

from collections.abc import Callable
from typing import Any

import nemo_run as run
from nemo.collections import llm
from nemo_run.cli.api import RunContext

from recipes.nemo2.model import LongContextModel
from recipes.resolved.overrides import override
from recipes.shipped import factories as factories


class CheckedContext(RunContext):
    """nemo-run's context of a command, for which Longhaul's recipes are checked."""

    def parse_fn(self, fn: Callable[..., Any], args: list[str], **given: Any) -> run.Partial:
        """Return the task that a factory or a file states, with `KEY=VALUE` words applied.

        Raises ValueError for a recipe of Longhaul's that its checks refuse.
        """
        recipe = super().parse_fn(fn, [], **given)
        model = getattr(recipe, "model", None)
        if isinstance(model, run.Config) and model.__fn_or_cls__ is LongContextModel:
            return override(recipe, args)
        return super().parse_fn(fn, args, **given)


llm.pretrain.cli_entrypoint.run_ctx_cls = CheckedContext
