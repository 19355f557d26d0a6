# SPDX-License-Identifier: Apache-2.0
"""Constraints of recompute, tiling and offload."""

from collections.abc import Iterator

from custom_modules.context_parallel.config import TRANSFORMER_ENGINE_KINDS
from custom_modules.memory.config import Tiling
from recipes.constraints.training_step import TrainingStep
from recipes.spec.units import GiB


def violations(step: TrainingStep) -> Iterator[str]:
    """Yield one sentence for each violated constraint; sizes must fit (`shapes.violations`)."""
    recompute, tiling, offload = step.recompute, step.tiling, step.offload
    cp_kind, per_stage = step.cp_kind.kind, step.layers_per_stage
    if recompute.layers > per_stage:
        yield (
            f"recompute layers is {recompute.layers}, and a pipeline stage has {per_stage}; "
            f"take at most {per_stage}"
        )
    if recompute.kind == "uniform" and not any(recompute.layers > len(one) for one in step.stages):
        lengths = sorted({len(one) for one in step.stages})
        if any(length % recompute.layers for length in lengths):
            yield (
                f"recompute uniform has groups of {recompute.layers} layers, and pipeline stages "
                f"have {' and '.join(map(str, lengths))}; take a number that divides them"
            )
    kept = "kept_attention" in (recompute.kind, recompute.others)
    if kept and cp_kind in TRANSFORMER_ENGINE_KINDS:
        yield (
            f"recompute is kept_attention and the context parallel kind {cp_kind}, whose output "
            "only Transformer Engine can keep; take ring, ulysses, head_chunked or hybrid, or "
            "recompute full"
        )
    if "core_attn" in recompute.modules and step.head_chunked:
        yield (
            "recompute modules include core_attn, but head-chunked attention keeps no queries, "
            "keys and values to recompute from; leave it out, or take ulysses, ring or hybrid"
        )
    if "mlp" in recompute.modules and tiling.mlp:
        yield (
            "recompute modules include mlp, and tiling mlp also recomputes the MLP, one tile at a "
            "time; leave one of them out"
        )
    if (why := offload.refusal(recompute)) is not None:
        yield why
        return
    in_flight = min(step.pp, step.micro_batches)  # nothing is offloaded if it is interleaved
    needed = max(
        step.saved.on_host(offload, recompute, layers=stage, in_flight=in_flight)
        for stage in step.stages
    )
    if needed > offload.cap_gib * GiB:
        yield (
            f"offload {offload.tensors} needs {needed / GiB:.3g} GiB of host memory on a rank "
            f"({per_stage} layers, {in_flight} micro-batches in flight) and cap_gib is "
            f"{offload.cap_gib:g}; raise it, or offload fewer tensors, or not every layer"
        )


def clamped_tiles(tiling: Tiling, *, tokens: int, tp: int) -> Iterator[str]:
    """Yield one sentence for each tile that is larger than the tokens it divides.

    `tokens` are those of a rank, before sequence parallelism divides them by TP.
    """
    for part, there in (("loss", tokens), ("mlp", tokens // tp)):
        tile = getattr(tiling, f"{part}_tile")
        if getattr(tiling, part) and tile > there:
            yield (
                f"tiling {part}_tile is {tile:,} tokens and a rank has {there:,}; they are one "
                "tile, and tiling saves nothing"
            )
