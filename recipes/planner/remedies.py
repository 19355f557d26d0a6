# SPDX-License-Identifier: Apache-2.0
"""What makes a stage fit that runs out of memory: a ladder of remedies, the cheapest first.

Each rung is tried alone on the layout as it is, and together with those above it that helped. A
rung may have several layouts (sizes of CP, say): of those that no law refuses the fastest that fits
is taken, or the one that lacks least. The climb goes up until it fits, and again without each rung
that it took, for as long as that ends faster: full recompute is not paid for where offload would
do. The `cure` is its rungs without those that it fits without. Bytes and seconds are the planner's;
`unexplained` are bytes that a log shows and the planner does not know, which no remedy is taken to
reduce.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from custom_modules.activation_memory import Offload, Recompute, Tiling
from recipes.cluster import Cluster
from recipes.layout import ContextParallel, Fp8
from recipes.planner.efficiency import HOPPER, Efficiency
from recipes.planner.job import Job
from recipes.planner.override_words import override_words
from recipes.planner.plan import HOST_SHARE, Plan, plan
from recipes.planner.refusals import refusals
from recipes.units import GiB, K

LEAST_HELP = 0.1 * GiB
"""What a rung has to save to be taken."""
MOST_GPUS, SHORTEST = 16, K
"""Times as many GPUs as now; tokens of a sequence."""
REBUILDING = frozenset({"recompute kept_attention", "recompute full"})
"""Rungs that are left out together: one of them comes where the other does not."""
KEPT, FULL = Recompute(kind="kept_attention"), Recompute(kind="full")

Found = Sequence[Job] | str
"""The jobs that a rung could make of one, or why it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One rung: what it does alone, and with those above it."""

    name: str
    alone: Plan | None = None
    """None where it is not possible."""
    fits: bool = False
    """Whether nothing is lacking with it alone."""
    why_not: str = ""
    words: tuple[str, ...] = ()
    """Overrides that apply it to the recipe."""
    together: Plan | None = None
    """With the rungs above it; None where it did not help there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cure:
    """The rungs that fit together."""

    names: tuple[str, ...]
    plan: Plan
    words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedies:
    """What there is to do about a plan."""

    ladder: tuple[Remedy, ...]
    cure: Cure | None
    """None where the whole ladder does not fit, and empty where nothing is lacking."""


def remedies(start: Plan, *, unexplained: float = 0.0, efficiency: Efficiency = HOPPER) -> Remedies:
    """Return the ladder for a plan, and the first set of rungs under which it fits."""
    climb = _Climb(start.cluster, unexplained, efficiency)
    together, taken = climb.fastest(start)
    ladder = []
    for name in RUNGS:
        found = climb.best(start.job, name)
        if isinstance(found, str):
            ladder.append(Remedy(name=name, why_not=found, together=together.get(name)))
            continue
        words = tuple(override_words(start.job, found.job))
        ladder.append(
            Remedy(
                name=name,
                alone=found,
                fits=not climb.lacking(found),
                words=words,
                together=together.get(name),
            )
        )
    return Remedies(ladder=tuple(ladder), cure=climb.least(start, taken))


class _Climb:
    """The rungs on one cluster."""

    def __init__(self, cluster: Cluster, unexplained: float, efficiency: Efficiency) -> None:
        self.cluster, self.unexplained, self.efficiency = cluster, unexplained, efficiency
        self._known: dict[tuple[str, int, str], Plan | str] = {}

    def lacking(self, one: Plan) -> float:
        """Return the bytes that GPU and host lack."""
        return max(one.short + self.unexplained, 0.0) + max(one.host_short, 0.0)

    def planned(self, job: Job) -> Plan:
        """Return the plan of a job, its host cap set to what it needs."""
        found = plan(job, self.cluster, efficiency=self.efficiency)
        offload = job.layout.offload
        if offload.tensors == "none":
            return found
        cap = math.ceil(found.memory.host / GiB * 10 + 1) / 10
        layout = replace(job.layout, offload=replace(offload, cap_gib=cap))
        return replace(found, job=replace(job, layout=layout))

    def best(self, job: Job, name: str) -> Plan | str:
        """Return the best plan that a rung makes of a job, or why there is none."""
        key = (name, job.seq_length, repr(job.layout))
        if key not in self._known:  # climbs begin alike
            self._known[key] = self._best(job, name)
        return self._known[key]

    def _best(self, job: Job, name: str) -> Plan | str:
        found = RUNGS[name](job, self.cluster)
        if isinstance(found, str):
            return found
        lawful, why = [], ""
        for one in found:
            broken = self._broken(one)
            if not broken:
                made = self.planned(one)
                broken = next(refusals(made.job, self.cluster), "")
            if broken:
                why = why or broken
            else:
                lawful.append(made)
        if not lawful:
            return why
        return min(lawful, key=self._cost)

    def _broken(self, job: Job) -> str:
        """Return the first law that a job breaks before its cap is known; the plan divides."""
        bare = replace(job, layout=replace(job.layout, offload=Offload()))
        return next(refusals(bare, self.cluster), "")

    def _cost(self, one: Plan) -> tuple[float, ...]:
        lacking = self.lacking(one)
        return (lacking, one.gpus, -one.job.seq_length, one.time.step)

    def fastest(self, start: Plan) -> tuple[dict[str, Plan], list[str]]:
        """Return the climb that ends best: the first, or one that leaves rungs of it out."""
        left_out: frozenset[str] = frozenset()
        best = self.climb(start, left_out)
        if not best[1]:
            return best
        while True:
            fewer = [left_out | names for names in (*({name} for name in best[1]), REBUILDING)]
            climbs = [(self.climb(start, names), names) for names in fewer]
            other, names = min(climbs, key=lambda one: self._end(start, one[0]))
            if self._end(start, other) >= self._end(start, best):
                return best
            best, left_out = other, names

    def _end(self, start: Plan, climb: tuple[dict[str, Plan], list[str]]) -> tuple[float, ...]:
        plans, taken = climb
        return self._cost(plans[taken[-1]] if taken else start)

    def climb(self, start: Plan, left_out: frozenset[str]) -> tuple[dict[str, Plan], list[str]]:
        """Return the plans on the way up, and the rungs taken, until it fits or nothing helps."""
        found: dict[str, Plan] = {}
        taken: list[str] = []
        here, before = start, math.inf
        while 0 < self.lacking(here) < before:  # a rung may help only once another has
            before = self.lacking(here)
            for name in RUNGS:
                if name in left_out or not self.lacking(here):
                    continue
                one = self.best(here.job, name)
                if isinstance(one, str) or not self._helps(here, one):
                    continue
                here = found[name] = one
                taken.append(name)
        return found, taken

    def _helps(self, here: Plan, one: Plan) -> bool:
        lacking = self.lacking(here)
        return self.lacking(one) <= lacking - min(LEAST_HELP, lacking)

    def least(self, start: Plan, taken: Iterable[str]) -> Cure | None:
        """Return the rungs that it does not fit without, the dearest left out first."""
        names = list(taken)
        best = self._after(start, names)
        if self.lacking(best):
            return None
        for place in reversed(range(len(names))):
            fewer = names[:place] + names[place + 1 :]
            found = self._after(start, fewer)
            if not self.lacking(found):
                names, best = fewer, found
        return Cure(names=tuple(names), plan=best, words=tuple(override_words(start.job, best.job)))

    def _after(self, start: Plan, names: Iterable[str]) -> Plan:
        here = start
        for name in names:
            one = self.best(here.job, name)
            if not isinstance(one, str):
                here = one
        return here


Rung = Callable[[Job, Cluster], Found]


def _with(job: Job, **changes: object) -> Job:
    return replace(job, layout=replace(job.layout, **changes))  # type: ignore[arg-type]


def _smaller_micro_batch(job: Job, cluster: Cluster) -> Found:
    most = job.layout.micro_batch
    if most == 1:
        return "the micro-batch is one sequence"
    return [_with(job, micro_batch=size) for size in _divisors(most)]


def _tiled_loss(job: Job, cluster: Cluster) -> Found:
    tiling = job.layout.tiling
    if tiling.loss:
        return "the loss is tiled"
    if job.tokens <= Tiling().loss_tile:
        return f"a rank has {job.tokens:,} tokens, which are one tile"
    return [_with(job, tiling=replace(tiling, loss=True))]


def _tiled_mlp(job: Job, cluster: Cluster) -> Found:
    tiling, tokens = job.layout.tiling, job.tokens // job.layout.tp
    if tiling.mlp:
        return "the MLP is tiled"
    if tokens <= Tiling().mlp_tile:
        return f"a rank has {tokens:,} tokens in its MLP, which are one tile"
    return [_with(job, tiling=replace(tiling, mlp=True))]


def _kept_attention(job: Job, cluster: Cluster) -> Found:
    if job.layout.recompute == KEPT:
        return "recompute is kept_attention"
    if job.layout.recompute == FULL:
        return "recompute is full, which keeps less"
    return [_with(job, recompute=KEPT)]


def _full_recompute(job: Job, cluster: Cluster) -> Found:
    if job.layout.recompute == FULL:
        return "recompute is full"
    tried = [_with(job, recompute=FULL)]
    if job.layout.offload.tensors == "both":  # there is no attention output to offload
        inputs = replace(job.layout.offload, tensors="inputs")
        tried.append(_with(job, recompute=FULL, offload=inputs))
    return tried


def _head_chunked(job: Job, cluster: Cluster) -> Found:
    cp = job.layout.cp
    if job.degrees.heads_per_stage:
        return "attention takes a few heads at a time"
    if job.degrees.ring > 1 and job.degrees.ulysses == 1:
        return "a ring has no all-to-all to take in stages"
    return [_with(job, cp=kind) for kind in _chunked(job, cp.size)]


def _chunked(job: Job, size: int) -> Iterator[ContextParallel]:
    """Yield the kinds of a size that attend with a few heads at a time."""
    if job.degrees.ring == 1:
        yield ContextParallel.head_chunked(size)
        return
    for heads in _divisors(job.card.heads // job.layout.tp):
        yield ContextParallel.hybrid(
            ulysses=job.degrees.ulysses, ring=job.degrees.ring, heads_per_stage=heads
        )


def _kinds(size: int) -> Iterator[ContextParallel]:
    """Yield the kinds of context parallelism; laws say which fit the heads."""
    yield ContextParallel.ulysses(size)
    yield ContextParallel.head_chunked(size)
    if size > 1:
        yield ContextParallel.ring(size)
    for inside in _divisors(size):
        if inside > 1:
            yield ContextParallel.hybrid(ulysses=inside, ring=size // inside)


def _more_cp(job: Job, cluster: Cluster) -> Found:
    layout = job.layout
    if layout.dp == 1:
        return "no data ranks are left to share sequences; that takes more GPUs"
    return [
        _with(job, cp=kind, dp=dp)
        for dp in _divisors(layout.dp)
        for kind in _kinds(layout.cp.size * layout.dp // dp)
    ]


def _more_tp(job: Job, cluster: Cluster) -> Found:
    layout = job.layout
    most = min(cluster.gpus_per_node, layout.world_size) // layout.tp
    if most < 2:
        return f"TP {layout.tp} fills the fast link"
    found = []
    for times in (2**n for n in range(1, most.bit_length())):
        if layout.dp % times == 0:
            found.append(_with(job, tp=layout.tp * times, dp=layout.dp // times))
        if layout.cp.size % times == 0:
            found += [
                _with(job, tp=layout.tp * times, cp=kind)
                for kind in _kinds(layout.cp.size // times)
            ]
    return found or f"neither DP {layout.dp} nor CP {layout.cp.size} has ranks to give"


def _offload(job: Job, cluster: Cluster, tensors: str) -> Found:
    layout = job.layout
    if layout.offload.tensors in (tensors, "both"):
        return f"{layout.offload.tensors} are offloaded" if tensors == "inputs" else "both are"
    cap = HOST_SHARE * cluster.host_bytes_per_gpu / GiB
    offload = Offload(tensors=tensors, cap_gib=cap)  # type: ignore[arg-type]
    recompute = layout.recompute
    if offload.refusal(recompute) and recompute.kind != "full":
        recompute = KEPT  # else there is nothing kept that could wait on the host
    return [_with(job, offload=offload, recompute=recompute)]


def _offload_inputs(job: Job, cluster: Cluster) -> Found:
    return _offload(job, cluster, "inputs")


def _offload_both(job: Job, cluster: Cluster) -> Found:
    return _offload(job, cluster, "both")


def _sharded(job: Job, cluster: Cluster) -> Found:
    if job.layout.sharding == "parameters":
        return "parameters are sharded"
    if job.replicas == 1:
        return "one rank has each parameter; there is none to share it with"
    tried = [_with(job, sharding="parameters")]
    if job.layout.tiling.loss:  # FSDP's law
        untiled = replace(job.layout.tiling, loss=False, loss_tile=Tiling().loss_tile)
        tried.append(_with(job, sharding="parameters", tiling=untiled))
    return tried


def _adam_on_host(job: Job, cluster: Cluster) -> Found:
    if job.layout.optimizer_offload == 1:
        return "Adam is on the host"
    return [
        _with(job, optimizer_offload=share)
        for share in (0.25, 0.5, 0.75, 1.0)
        if share > job.layout.optimizer_offload
    ]


def _fp8(job: Job, cluster: Cluster) -> Found:
    if job.layout.fp8.recipe != "none":
        return f"fp8 is {job.layout.fp8.recipe}"
    if not cluster.gpu.fp8_tflops:
        return f"{cluster.gpu.name} has no FP8"
    return [_with(job, fp8=Fp8(recipe="tensorwise"))]


def _more_gpus(job: Job, cluster: Cluster) -> Found:
    layout, found = job.layout, []
    for times in (2**n for n in range(1, MOST_GPUS.bit_length())):
        found.append(_with(job, dp=layout.dp * times))
        found += [_with(job, cp=kind) for kind in _kinds(layout.cp.size * times)]
    return found


def _shorter_stage(job: Job, cluster: Cluster) -> Found:
    found, length = [], job.seq_length
    while length % 2 == 0 and length // 2 >= SHORTEST:
        length //= 2
        found.append(replace(job, seq_length=length))
    return found or f"{job.seq_length:,} tokens do not halve"


def _divisors(most: int) -> list[int]:
    """Return the divisors below a number."""
    return [size for size in range(1, most) if most % size == 0]


RUNGS: dict[str, Rung] = {
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
"""In the order of what they cost."""
