# SPDX-License-Identifier: Apache-2.0
"""Constraints of layers that differ (`custom_modules.rope.layers`)."""

from collections.abc import Iterator, Sequence

from custom_modules.context_parallel.config import TRANSFORMER_ENGINE_KINDS
from custom_modules.rope.layers import LayerPattern
from recipes.constraints.training_step import TrainingStep
from recipes.spec import pipeline


def violations(step: TrainingStep) -> Iterator[str]:
    """Yield one sentence for each violated constraint; sizes must fit (`shapes.violations`)."""
    pattern = step.pattern
    if pattern is None or pattern.window is None:
        return
    kind = step.cp_kind.kind
    if kind in TRANSFORMER_ENGINE_KINDS:
        yield (
            f"local layers have a window of {pattern.window:,} tokens and the context parallel "
            f"kind is {kind}, which is Transformer Engine's and has no window here; take ring, "
            "ulysses, head_chunked or hybrid"
        )
    if pattern.window >= step.seq_length or evenly_full(pattern, step.layers, step.pp, step.vpp):
        return
    counts = sorted({_full(pattern, numbers) for numbers in step.stages})
    sizes = f"{step.pp}" if step.vpp == 1 else f"{step.pp} x VPP {step.vpp}"
    yield (
        f"PP {sizes} cuts the pattern ({pattern.describe()}): its stages have "
        f"{' or '.join(map(str, counts))} full layers, and all wait for those with the most; "
        f"PP may be {', '.join(map(str, pipeline_sizes(step)))}"
    )


def pipeline_sizes(step: TrainingStep) -> list[int]:
    """Return the sizes of PP that divide the layers and, with windows, do not cut their pattern."""
    layers, pattern = step.layers, step.pattern
    sizes = [size for size in range(1, layers + 1) if pipeline.divides(size, layers)]
    if pattern is None or pattern.window is None or pattern.window >= step.seq_length:
        return sizes
    return [size for size in sizes if evenly_full(pattern, layers, size)]


def evenly_full(pattern: LayerPattern, layers: int, pp: int, vpp: int = 1) -> bool:
    """Whether all pipeline stages have the same number of full layers."""
    return len({_full(pattern, numbers) for numbers in pipeline.stages(layers, pp, vpp)}) == 1


def _full(pattern: LayerPattern, numbers: Sequence[int]) -> int:
    return sum(pattern.is_full(number) for number in numbers)
