# SPDX-License-Identifier: Apache-2.0
"""Training whose model is built with another rotation than its recipe has, on one of its ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from tests.runs.train import stand_for_torchrun, train


def ignore_factor(factor: float) -> None:
    """Make the builder of models ignore the factor of the recipe."""
    from recipes.nemo2.model import LongContextMixin

    built = LongContextMixin.configure_model

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        stated = self.rope
        self.rope = replace(stated, factor=factor)
        try:
            return built(self, *args, **kwargs)
        finally:
            self.rope = stated

    LongContextMixin.configure_model = build


def hand_over_other_tables(factor: float) -> None:
    """Make the tables that attention gets those of another factor, and nothing else."""
    from custom_modules.rope.rotary import Rotation

    table: Callable[..., Any] = Rotation.table

    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        return table(Rotation(replace(self.scaling, factor=factor), self.head_dim), *args, **kwargs)

    Rotation.table = other


def refused_on_forked_rank(options: dict[str, Any], output: str, plant: str, rank: int) -> str:
    """Return with what training ends on a rank if a rotation is planted on one of them."""
    from recipes.checkpoints.rotation import RotationError

    if dist.get_rank() == rank:
        {"builder": ignore_factor, "tables": hand_over_other_tables}[plant](2.0)
    store = stand_for_torchrun(output)
    try:
        train(options)
    except RotationError as error:
        return str(error)
    finally:
        del store
    return "it trained"
