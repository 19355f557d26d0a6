# SPDX-License-Identifier: Apache-2.0
"""Settings that decide the memory of given parallel sizes: the product of

    recompute           nothing, kept attention, full
    tiling              loss, loss and MLP; neither loss where FSDP gathers the LM head
    offload             nothing, inputs, inputs and attention outputs
    sharding            of the optimizer (ZeRO-1), of parameters too (ZeRO-3, Megatron FSDP)
    Adam on the host    no share of it, or the least that fits (`adam_on_host`)
    chunks of a stage   one, or several (an interleaved pipeline), then without offload and FSDP

without those that another one beats in both time and memory: full recompute keeps no attention
output to offload, and a tiled MLP costs nothing once it is recomputed. The last of a list takes the
least GPU memory. ZeRO-2 is tried where nothing is tiled. Not searched: recompute that differs
between layers, and Megatron's own recompute.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from custom_modules.memory.config import Offload, Recompute, Tiling
from recipes.planner.kernels import FUSED
from recipes.planner.memory import Memory
from recipes.planner.plan import host_cap, short
from recipes.planner.search.parallel_sizes import cuts
from recipes.planner.search.request import SearchRequest
from recipes.spec import pipeline
from recipes.spec.layout import Layout

NONE, KEPT, FULL = Recompute(), Recompute(kind="kept_attention"), Recompute(kind="full")
UNTILED, LOSS, STAYS = Tiling(), Tiling(loss=True), Offload()
MOST_CHUNKS = 8
"""Chunks of a stage of an interleaved pipeline that are tried at most."""
HOST_SHARES = 10
"""Shares of the optimizer that are tried on the host, a tenth and its multiples."""


Settings = dict[str, Any]
"""Fields of a layout."""


def without_recompute(question: SearchRequest, shape: Layout) -> Layout:
    """Return the layout that bounds the time of all settings of a shape from below."""
    return replace(shape, tiling=_tiled_loss(question, shape))


def with_adam_on_device(question: SearchRequest, shape: Layout) -> list[Settings]:
    """Return the settings of ZeRO-1, the kinds that have been tried on GPUs."""
    loss = _tiled_loss(question, shape)
    found = _product(question, shape, loss)
    if loss.loss and not _tiled_loss_is_smaller(question, shape):
        found += _product(question, shape, UNTILED)
    return found


def with_sharded_parameters(question: SearchRequest, shape: Layout) -> list[Settings]:
    """Return the settings of ZeRO-3, which has neither a tiled loss nor a pipeline."""
    if shape.pp > 1:
        return []
    settings = _product(question, shape, UNTILED)
    return [{**one, "sharding": "parameters"} for one in settings]


def with_sharded_gradients(question: SearchRequest, shape: Layout) -> list[Settings]:
    """Return the settings of ZeRO-2, which has no tiling, pipeline or heads in stages."""
    if shape.pp > 1 or shape.cp.how.may_chunk_heads:
        return []
    settings = _product(question, shape, UNTILED, mlp_may_be_tiled=False)
    return [{**one, "sharding": "gradients"} for one in settings]


def with_interleaved_pipeline(question: SearchRequest, shape: Layout) -> list[Settings]:
    """Return the settings of ZeRO-1 in an interleaved pipeline, which offloads nothing."""
    chunks = chunks_of_stage(question, shape)
    if not chunks:
        return []
    loss = _tiled_loss(question, shape)
    on_device = [one for one in _product(question, shape, loss) if one["offload"] == STAYS]
    return [{**one, "vpp": vpp} for vpp in chunks for one in on_device]


def chunks_of_stage(question: SearchRequest, shape: Layout) -> list[int]:
    """Return the numbers of chunks that a stage of the shape may have, but 1, the fewest first."""
    workload = question.workload(shape)
    if shape.pp == 1 or workload.micro_batches % shape.pp:
        return []
    return [
        vpp
        for vpp in range(2, MOST_CHUNKS + 1)
        if pipeline.divides(shape.pp, question.card.layers, vpp)
        and not cuts(question.card, question.seq_length, shape.pp, vpp)
    ]


def adam_on_host(question: SearchRequest, layout: Layout, held: Memory) -> Iterator[Layout]:
    """Yield a layout with the least share of Adam on the host that frees what the GPU lacks.

    `held` is the memory of the layout with Adam on the GPU. With a pipeline the stage that is then
    the fullest may be another one, so a layout with all of Adam on the host follows.
    """
    lacking, _ = short(held, question.cluster)
    if not (on_gpu := held.categories["optimizer"]):
        return
    share = math.ceil(HOST_SHARES * lacking / on_gpu)
    if share <= HOST_SHARES:
        yield replace(layout, optimizer_offload=share / HOST_SHARES)
    if share < HOST_SHARES and layout.pp > 1:
        yield replace(layout, optimizer_offload=1.0)


def _product(
    question: SearchRequest, shape: Layout, loss: Tiling, *, mlp_may_be_tiled: bool = True
) -> list[Settings]:
    """Return recompute x tiled MLP x offload of a shape, about from the fastest to the leanest."""
    tokens = _tokens(question, shape) // shape.tp
    tiled = mlp_may_be_tiled and tokens > UNTILED.mlp_tile and shape.fp8.recipe != "delayed"
    tiled = tiled and not question.card.facts.experts
    both = replace(loss, mlp=True)
    cap = host_cap(question.cluster)
    inputs, everything = (Offload(tensors=kind, cap_gib=cap) for kind in ("inputs", "both"))
    leanest = both if tiled else loss
    settings = [(NONE, loss, STAYS), (KEPT, loss, STAYS)]
    settings += [(NONE, both, STAYS), (KEPT, both, STAYS)] if tiled else []
    settings += [
        (KEPT, leanest, inputs),
        (KEPT, leanest, everything),
        (FULL, leanest, STAYS),
        (FULL, leanest, inputs),
    ]
    return [
        {"recompute": recompute, "tiling": tiling, "offload": offload}
        for recompute, tiling, offload in settings
    ]


def _tiled_loss(question: SearchRequest, shape: Layout) -> Tiling:
    """Return a tiled loss if a rank has more than one tile."""
    return LOSS if _tokens(question, shape) > LOSS.loss_tile else UNTILED


def _tiled_loss_is_smaller(question: SearchRequest, shape: Layout) -> bool:
    """Whether a tile of logits and the sums of the head's gradients are less than the logits."""
    logits = FUSED.logit_bytes * _tokens(question, shape)
    return logits > FUSED.logit_bytes * question.card.hidden + 2 * LOSS.loss_tile


def _tokens(question: SearchRequest, shape: Layout) -> int:
    """Return the tokens of a rank, before sequence parallelism divides them by TP."""
    return question.seq_length // shape.cp.size * shape.micro_batch
