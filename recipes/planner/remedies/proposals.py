# SPDX-License-Identifier: Apache-2.0
"""Remedies for a workload that does not fit: each proposes other workloads, or says why not.

A proposed workload may violate a constraint; `recipes.planner.remedies.climb` checks and chooses.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from custom_modules.memory.config import Offload, Recompute, Tiling
from recipes.planner.plan import host_cap
from recipes.planner.workload import Workload
from recipes.spec.cluster import Cluster
from recipes.spec.layout import ContextParallel, Fp8
from recipes.spec.units import K

MOST_GPUS, SHORTEST = 16, K
"""Largest multiple of the current GPUs; shortest sequence in tokens."""
KEPT, FULL = Recompute(kind="kept_attention"), Recompute(kind="full")

Proposed = Sequence[Workload] | str
"""Workloads that a remedy proposes, or the reason why there are none."""
Remedy = Callable[[Workload, Cluster], Proposed]


def _with(workload: Workload, **changes: object) -> Workload:
    return replace(workload, layout=replace(workload.layout, **changes))  # type: ignore[arg-type]


def _smaller_micro_batch(workload: Workload, cluster: Cluster) -> Proposed:
    most = workload.layout.micro_batch
    if most == 1:
        return "the micro-batch is one sequence"
    return [_with(workload, micro_batch=size) for size in _divisors(most)]


def _tiled_loss(workload: Workload, cluster: Cluster) -> Proposed:
    tiling = workload.layout.tiling
    if tiling.loss:
        return "the loss is already tiled"
    if workload.tokens <= Tiling().loss_tile:
        return f"a rank has {workload.tokens:,} tokens, which are one tile"
    return [_with(workload, tiling=replace(tiling, loss=True))]


def _tiled_mlp(workload: Workload, cluster: Cluster) -> Proposed:
    tiling, tokens = workload.layout.tiling, workload.tokens // workload.layout.tp
    if tiling.mlp:
        return "the MLP is already tiled"
    if tokens <= Tiling().mlp_tile:
        return f"a rank has {tokens:,} tokens in its MLP, which are one tile"
    return [_with(workload, tiling=replace(tiling, mlp=True))]


def _kept_attention(workload: Workload, cluster: Cluster) -> Proposed:
    if workload.layout.recompute == KEPT:
        return "recompute is kept_attention"
    if workload.layout.recompute == FULL:
        return "recompute is full, which keeps less"
    return [_with(workload, recompute=KEPT)]


def _full_recompute(workload: Workload, cluster: Cluster) -> Proposed:
    if workload.layout.recompute == FULL:
        return "recompute is full"
    tried = [_with(workload, recompute=FULL)]
    if workload.layout.offload.tensors == "both":  # there is no attention output to offload
        inputs = replace(workload.layout.offload, tensors="inputs")
        tried.append(_with(workload, recompute=FULL, offload=inputs))
    return tried


def _head_chunked(workload: Workload, cluster: Cluster) -> Proposed:
    cp = workload.layout.cp
    if workload.degrees.heads_per_stage:
        return "attention takes a few heads at a time"
    if workload.card.facts.wide_qk_norm:
        return "queries and keys are normalised over all heads at once"
    if workload.degrees.ring > 1 and workload.degrees.ulysses == 1:
        return "a ring has no all-to-all to take in stages"
    return [_with(workload, cp=kind) for kind in _chunked(workload, cp.size)]


def _chunked(workload: Workload, size: int) -> Iterator[ContextParallel]:
    """Yield the kinds of context parallelism that take a few heads at a time."""
    if workload.degrees.ring == 1:
        yield ContextParallel.head_chunked(size)
        return
    for heads in _divisors(workload.card.heads // workload.layout.tp):
        yield ContextParallel.hybrid(
            ulysses=workload.degrees.ulysses, ring=workload.degrees.ring, heads_per_stage=heads
        )


def _kinds(size: int) -> Iterator[ContextParallel]:
    """Yield the kinds of context parallelism; constraints decide which fit the heads."""
    yield ContextParallel.ulysses(size)
    yield ContextParallel.head_chunked(size)
    if size > 1:
        yield ContextParallel.ring(size)
    for inside in _divisors(size):
        if inside > 1:
            yield ContextParallel.hybrid(ulysses=inside, ring=size // inside)


def _more_cp(workload: Workload, cluster: Cluster) -> Proposed:
    layout = workload.layout
    if layout.dp == 1:
        return "no data ranks are left to split sequences over; that needs more GPUs"
    return [
        _with(workload, cp=kind, dp=dp)
        for dp in _divisors(layout.dp)
        for kind in _kinds(layout.cp.size * layout.dp // dp)
    ]


def _more_tp(workload: Workload, cluster: Cluster) -> Proposed:
    layout = workload.layout
    most = min(cluster.linked_gpus, layout.world_size) // layout.tp
    if most < 2:
        return f"TP {layout.tp} fills the fast link"
    found = []
    for times in (2**n for n in range(1, most.bit_length())):
        if layout.dp % times == 0:
            found.append(_with(workload, tp=layout.tp * times, dp=layout.dp // times))
        if layout.cp.size % times == 0:
            found += [
                _with(workload, tp=layout.tp * times, cp=kind)
                for kind in _kinds(layout.cp.size // times)
            ]
    return found or f"neither DP {layout.dp} nor CP {layout.cp.size} has ranks to give"


def _offload(workload: Workload, cluster: Cluster, tensors: str) -> Proposed:
    layout = workload.layout
    if layout.offload.tensors in (tensors, "both"):
        return f"{layout.offload.tensors} are offloaded" if tensors == "inputs" else "both are"
    cap = host_cap(cluster)
    offload = Offload(tensors=tensors, cap_gib=cap)  # type: ignore[arg-type]
    recompute = layout.recompute
    if offload.refusal(recompute) and recompute.kind != "full":
        recompute = KEPT  # otherwise nothing is kept that could be offloaded
    return [_with(workload, offload=offload, recompute=recompute)]


def _offload_inputs(workload: Workload, cluster: Cluster) -> Proposed:
    return _offload(workload, cluster, "inputs")


def _offload_both(workload: Workload, cluster: Cluster) -> Proposed:
    return _offload(workload, cluster, "both")


def _sharded(workload: Workload, cluster: Cluster) -> Proposed:
    if workload.layout.sharding == "parameters":
        return "parameters are sharded"
    if workload.replicas == 1:
        return "each parameter is on one rank only; there is no rank to shard it over"
    tried = [_with(workload, sharding="parameters")]
    if workload.layout.tiling.loss:  # not possible with FSDP
        untiled = replace(workload.layout.tiling, loss=False, loss_tile=Tiling().loss_tile)
        tried.append(_with(workload, sharding="parameters", tiling=untiled))
    return tried


def _adam_on_host(workload: Workload, cluster: Cluster) -> Proposed:
    if workload.layout.optimizer_offload == 1:
        return "Adam is on the host"
    return [
        _with(workload, optimizer_offload=share)
        for share in (0.25, 0.5, 0.75, 1.0)
        if share > workload.layout.optimizer_offload
    ]


def _fp8(workload: Workload, cluster: Cluster) -> Proposed:
    if workload.layout.fp8.recipe != "none":
        return f"fp8 is {workload.layout.fp8.recipe}"
    if not cluster.gpu.fp8_tflops:
        return f"{cluster.gpu.name} has no FP8"
    return [_with(workload, fp8=Fp8(recipe="tensorwise"))]


def _more_gpus(workload: Workload, cluster: Cluster) -> Proposed:
    layout, found = workload.layout, []
    for times in (2**n for n in range(1, MOST_GPUS.bit_length())):
        found.append(_with(workload, dp=layout.dp * times))
        found += [_with(workload, cp=kind) for kind in _kinds(layout.cp.size * times)]
    return found


def _shorter_stage(workload: Workload, cluster: Cluster) -> Proposed:
    found, length = [], workload.seq_length
    while length % 2 == 0 and length // 2 >= SHORTEST:
        length //= 2
        found.append(replace(workload, seq_length=length))
    return found or f"{workload.seq_length:,} tokens do not halve"


def _divisors(most: int) -> list[int]:
    """Return the divisors smaller than a number."""
    return [size for size in range(1, most) if most % size == 0]


REMEDIES: dict[str, Remedy] = {
    "smaller micro-batch": _smaller_micro_batch,
    "tiled loss": _tiled_loss,
    "tiled MLP": _tiled_mlp,
    "recompute kept_attention": _kept_attention,
    "recompute full": _full_recompute,
    "fewer heads at a time": _head_chunked,
    "more CP": _more_cp,
    "more TP": _more_tp,
    "offload inputs": _offload_inputs,
    "offload both": _offload_both,
    "sharded parameters": _sharded,
    "Adam on the host": _adam_on_host,
    "FP8": _fp8,
    "more GPUs": _more_gpus,
    "shorter stage": _shorter_stage,
}
"""In the order of their cost."""
