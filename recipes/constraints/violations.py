# SPDX-License-Identifier: Apache-2.0
"""All constraints between the model, the layout and the batch of a training step."""

from collections.abc import Iterator

from recipes.constraints import fp8, layers, memory, shapes, sharding
from recipes.constraints.training_step import TrainingStep

OF_EXPERTS = (
    "the model has experts, which support neither a tiled MLP (the router's loss is over all "
    "tokens) nor FP8; leave tiling mlp and fp8 out"
)


def violations(step: TrainingStep) -> Iterator[str]:
    """Yield one sentence for each violated constraint: what is wrong, its value, what would do.

    Sizes that do not fit together end them, since the other constraints divide by these.
    """
    of_shapes = list(shapes.violations(step))
    if of_shapes:
        yield from of_shapes
        return
    yield from layers.violations(step)
    yield from sharding.violations(step)
    yield from memory.violations(step)
    yield from fp8.violations(step)
    if step.experts and (step.tiling.mlp or step.fp8.recipe != "none"):
        yield OF_EXPERTS
