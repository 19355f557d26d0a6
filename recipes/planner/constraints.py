# SPDX-License-Identifier: Apache-2.0
"""The constraints of the recipe check, applied to a job before its recipe is built."""

from collections.abc import Iterator
from dataclasses import replace

from custom_modules.memory.config import Offload, SavedTensors
from recipes.constraints import laws
from recipes.planner.workload import Workload
from recipes.spec.cluster import Cluster

CUDA = (12, 9)
"""CUDA version assumed for FP8 recipes, since no device is queried: that of recent builds."""


def before_planning(job: Workload, cluster: Cluster) -> str:
    """Return the first constraint that a job violates with any host cap, or an empty string.

    A plan relies on these constraints, and then sets the cap that it needs.
    """
    bare = replace(job, layout=replace(job.layout, offload=Offload()))
    return next(refusals(bare, cluster), "")


def refusals(job: Workload, cluster: Cluster) -> Iterator[str]:
    """Yield one sentence for each constraint that a job violates on a cluster."""
    layout, card = job.layout, job.card
    devices = min(layout.world_size, cluster.gpus_per_node)
    if layout.world_size % devices:
        yield f"{layout.world_size} ranks are not a whole number of nodes of {devices}"
        return
    of_shapes = list(
        laws.broken(
            seq_length=job.seq_length,
            heads=card.heads,
            kv_heads=card.kv_heads,
            head_dim=card.head_dim,
            layers=card.layers,
            vocab=card.vocab,
            tp=layout.tp,
            cp=layout.cp.size,
            cp_kind=layout.cp.how,
            pp=layout.pp,
            world_size=layout.world_size,
            ranks_per_node=devices,
            global_batch=job.tokens_per_batch // job.seq_length,
            micro_batch=layout.micro_batch,
        )
    )
    if of_shapes:
        yield from of_shapes
        return  # the checks below divide by them
    yield from _of_memory(job)
    yield from _of_fp8(job, cluster)
    if card.facts.experts and (layout.tiling.mlp or layout.fp8.recipe != "none"):
        yield (
            f"{card.name} has experts, which support neither a tiled MLP nor FP8; leave tiling mlp "
            "and fp8 out"
        )


def _of_memory(job: Workload) -> Iterator[str]:
    layout, head_chunked = job.layout, bool(job.degrees.heads_per_stage)
    yield from laws.broken_sharding(
        layout.sharding,
        pp=layout.pp,
        optimizer_offload=layout.optimizer_offload,
        precision_aware=bool(layout.optimizer_offload),  # `recipes.pretrain` sets both
        tiling=layout.tiling,
        head_chunked=head_chunked,
    )
    yield from laws.broken_memory(
        recompute=layout.recompute,
        tiling=layout.tiling,
        offload=layout.offload,
        cp_kind=layout.cp.how.kind,
        head_chunked=head_chunked,
        saved=SavedTensors(
            tokens=job.tokens,
            hidden=job.card.hidden,
            heads=job.card.heads // layout.tp,
            head_dim=job.card.head_dim,
            tp=layout.tp,
            element_bytes=job.element_bytes,
        ),
        layers=job.card.layers,
        pp=layout.pp,
        micro_batches=job.micro_batches,
    )


def _of_fp8(job: Workload, cluster: Cluster) -> Iterator[str]:
    layout, card, recipe = job.layout, job.card, job.layout.fp8.recipe
    if recipe == "none":
        return
    device = laws.fp8_refusal(recipe, cluster.gpu.capability, CUDA)
    if device is not None:
        yield device
    yield from laws.broken_fp8(
        layout.fp8,
        on_cpu=layout.device == "cpu",
        bf16=layout.precision == "bf16",
        transformer_engine=True,
        head_chunked=bool(job.degrees.heads_per_stage),
        tiling=layout.tiling,
        hidden=card.hidden,
        ffn=card.ffn_hidden // layout.tp,
        qkv=(card.heads + 2 * card.kv_heads) * card.head_dim // layout.tp,
        tokens=job.tokens // layout.tp,
        micro_batch=layout.micro_batch,
        layers=card.layers,
        pp=layout.pp,
    )
