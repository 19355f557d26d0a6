# SPDX-License-Identifier: Apache-2.0
"""Search for the layouts of a stage on a given number of GPUs, ranked by step time, then memory.

Tries all sizes of TP (powers of two), CP, PP and DP that the model and the batch admit, with the
kinds of context parallelism that fit the heads. Recompute, tiling and offload are tried in the
order of their cost in time, so the first that fits and that the recipe's constraints allow is
taken. Not searched: recompute that differs between layers, Megatron's own recompute, ZeRO-2, and
uneven pipelines.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from custom_modules.context_parallel.config import fits_ulysses, stage_sizes
from custom_modules.memory.config import Offload, Recompute, Tiling
from recipes.planner.feasibility import before_planning, violations
from recipes.planner.memory import memory
from recipes.planner.plan import Plan, capped, host_cap, short
from recipes.planner.workload import Workload
from recipes.spec.cluster import Cluster
from recipes.spec.layout import ContextParallel, Fp8, Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.stage import Stage
from recipes.spec.units import GiB, K

MOST_PP, MICRO_BATCHES = 16, (1, 2, 4)
UNEVEN_SEQUENCE = "2 x CP x TP does not divide a sequence of {:,} tokens"
UNEVEN_BATCH = "DP does not divide a batch of {:,} sequences"
MOST_GPUS = 64
"""Largest multiple of the requested GPUs that is tried for an alternative."""
LARGEST_CLUSTER = 2**20
"""Largest number of GPUs that is planned for."""
MICRO_BATCH_BELOW = 16 * K
"""Tokens per rank below which larger micro-batches are tried."""
KEPT, FULL = Recompute(kind="kept_attention"), Recompute(kind="full")


class NoLayoutError(ValueError):
    """Raised when nothing fits; says what is lacking, how much, and what would fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """A stage and the GPUs to lay it out on."""

    card: ModelCard
    seq_length: int
    tokens_per_batch: int
    cluster: Cluster
    gpus: int
    fp8: Fp8 = Fp8()

    def workload(self, layout: Layout) -> Workload:
        """Return the workload of a layout."""
        return Workload(
            card=self.card,
            seq_length=self.seq_length,
            tokens_per_batch=self.tokens_per_batch,
            layout=layout,
            gpus_per_node=self.cluster.gpus_per_node,
        )

    def plan(self, layout: Layout) -> Plan:
        """Return the plan of a layout, its host cap set to what it needs."""
        return capped(self.workload(layout), self.cluster)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The result of a search."""

    plans: list[Plan]
    """Plans that fit, the fastest first."""
    ruled_out: Counter[str] = field(default_factory=Counter)
    """Reasons why other layouts are excluded, with their number."""
    nearest: Plan | None = None
    """The plan that lacks the least memory of those that do not fit."""
    refused: str = ""
    """The constraint that the first plan that fits in memory violates."""
    tried: int = 0


def best(
    card: ModelCard, stage: Stage, cluster: Cluster, *, gpus: int, fp8: Fp8 | None = None
) -> Plan:
    """Return the fastest plan of a stage; raise NoLayoutError if none fits."""
    question = of_stage(card, stage, cluster, gpus=gpus, fp8=fp8 or Fp8())
    answer = search(question)
    if not answer.plans:
        raise NoLayoutError(why_not(question, answer))
    return answer.plans[0]


def of_stage(
    card: ModelCard, stage: Stage, cluster: Cluster, *, gpus: int, fp8: Fp8
) -> SearchRequest:
    """Return the question for a stage of a ladder."""
    return SearchRequest(
        card=card,
        seq_length=stage.seq_length,
        tokens_per_batch=stage.tokens_per_batch,
        cluster=cluster,
        gpus=gpus,
        fp8=fp8,
    )


def search(question: SearchRequest) -> SearchResult:
    """Return the layouts that fit.

    Layouts that are untested on GPUs or slow by published measurements (Megatron FSDP, Adam on the
    host) are searched only if nothing else fits.
    """
    shapes: list[Layout] = []
    answer = SearchResult(plans=[])
    shapes.extend(_shapes(question, answer.ruled_out))
    for ways in (_keeping, _last_resorts):
        answer = _fitting(question, shapes, ways, answer)
        if answer.plans:
            break
    return answer


def _fitting(
    question: SearchRequest,
    shapes: list[Layout],
    ways: Callable[[SearchRequest, Layout], Iterator[Layout]],
    before: SearchResult,
) -> SearchResult:
    """Return the first layout of each shape that fits, with those ruled out before."""
    plans: list[Plan] = []
    ruled_out, nearest, tried = before.ruled_out, before.nearest, before.tried
    refused = before.refused
    for shape in shapes:
        for layout in ways(question, shape):
            tried += 1
            one = question.plan(layout)
            if one.fits:
                broken = next(violations(one.workload, question.cluster), "")
                if not broken:
                    plans.append(one)
                    break
                ruled_out[broken] += 1
                refused = refused or broken
                continue
            lacks = "GPU memory" if one.short > 0 else "host memory"
            ruled_out[f"too little {lacks}"] += 1
            if nearest is None or _lacking(one) < _lacking(nearest):
                nearest = one
    plans.sort(key=lambda one: (float(f"{one.time.step:.4g}"), one.memory.total))
    return SearchResult(
        plans=plans, ruled_out=ruled_out, nearest=nearest, refused=refused, tried=tried
    )


def _lacking(one: Plan) -> float:
    return max(one.short, 0) + max(one.host_short, 0)


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _shapes(question: SearchRequest, ruled_out: Counter[str]) -> Iterator[Layout]:
    """Yield layouts with all sizes of parallelism, without recompute, tiling and offload."""
    card, cluster, gpus = question.card, question.cluster, question.gpus
    if gpus < 1:
        raise ValueError(f"{gpus} GPUs; there must be at least 1")
    if gpus > LARGEST_CLUSTER:
        raise ValueError(f"{gpus:,} GPUs; layouts are planned for at most {LARGEST_CLUSTER:,}")
    sequences, rest = divmod(question.tokens_per_batch, question.seq_length)
    if rest or not sequences:
        raise ValueError(
            f"a batch of {question.tokens_per_batch:,} tokens is not a whole number of sequences "
            f"of {question.seq_length:,}; take a multiple of it"
        )
    for tp in _powers(min(cluster.linked_gpus, gpus)):
        if card.heads % tp or card.kv_heads % tp:
            ruled_out[f"TP {tp} does not divide heads and KV heads"] += 1
            continue
        for pp in _divisors(gpus // tp if gpus % tp == 0 else 1):
            if pp > MOST_PP or card.layers % pp or gpus % (tp * pp):
                continue
            for cp in _divisors(gpus // (tp * pp)):
                dp = gpus // (tp * pp * cp)
                if question.seq_length % (cp * tp * (2 if cp > 1 else 1)):
                    ruled_out[UNEVEN_SEQUENCE.format(question.seq_length)] += 1
                elif sequences % dp:
                    ruled_out[UNEVEN_BATCH.format(sequences)] += 1
                else:
                    yield from _of_sizes(question, tp, pp, cp, dp, sequences)


def _of_sizes(
    question: SearchRequest, tp: int, pp: int, cp: int, dp: int, sequences: int
) -> Iterator[Layout]:
    rank_tokens = question.seq_length // cp
    for kind in _kinds(question, tp, cp):
        for micro in MICRO_BATCHES:
            if micro > 1 and rank_tokens * micro > MICRO_BATCH_BELOW:
                break
            if sequences % (dp * micro) or sequences // (dp * micro) < pp:
                continue
            yield Layout(tp=tp, cp=kind, pp=pp, dp=dp, micro_batch=micro, fp8=question.fp8)


def _kinds(question: SearchRequest, tp: int, cp: int) -> Iterator[ContextParallel]:
    """Yield the kinds of context parallelism for the heads of a TP rank."""
    heads, kv_heads = question.card.heads // tp, question.card.kv_heads // tp
    if cp == 1:
        yield ContextParallel.ulysses(1)
        yield ContextParallel.head_chunked(1)
        return
    if fits_ulysses(heads, kv_heads, cp):
        yield ContextParallel.ulysses(cp)
        if stage_sizes(heads, kv_heads, cp)[0] < heads:
            yield ContextParallel.head_chunked(cp)
    yield ContextParallel.ring(cp)
    inside = [
        size
        for size in _divisors(cp)
        if 1 < size <= min(cp // 2, question.cluster.linked_gpus // tp)
        and fits_ulysses(heads, kv_heads, size)
    ]
    if inside:
        yield ContextParallel.hybrid(ulysses=inside[-1], ring=cp // inside[-1])
        stage = stage_sizes(heads, kv_heads, inside[-1])[0]
        if stage < heads:
            yield ContextParallel.hybrid(
                ulysses=inside[-1], ring=cp // inside[-1], heads_per_stage=stage
            )


def _tilings(question: SearchRequest, shape: Layout) -> tuple[Tiling, Tiling]:
    """Return tiled loss, and tiled loss and MLP, if a rank has more than one tile."""
    tokens = question.seq_length // shape.cp.size * shape.micro_batch
    loss = Tiling(loss=True) if tokens > Tiling().loss_tile else Tiling()
    many = tokens // shape.tp > Tiling().mlp_tile
    if question.card.facts.experts or not many or shape.fp8.recipe == "delayed":
        return loss, loss
    return loss, replace(loss, mlp=True)


def _offloads(question: SearchRequest) -> tuple[Offload, Offload]:
    """Return the offload of layer inputs, and of both, capped by a rank's share of the host."""
    cap = host_cap(question.cluster)
    return Offload(tensors="inputs", cap_gib=cap), Offload(tensors="both", cap_gib=cap)


def _keeping(question: SearchRequest, shape: Layout) -> Iterator[Layout]:
    """Yield a shape with recompute, tiling and offload, from the fastest to the smallest."""
    loss, both = _tilings(question, shape)
    inputs, everything = _offloads(question)
    ways = (
        (Recompute(), loss, Offload()),
        (Recompute(), both, Offload()),
        (KEPT, loss, Offload()),
        (KEPT, both, Offload()),
        (KEPT, both, inputs),
        (KEPT, both, everything),
        (FULL, both, inputs),
    )
    seen = set()
    for recompute, tiling, offload in ways:
        key = (recompute.kind, tiling, offload.tensors)
        if key not in seen:
            seen.add(key)
            yield replace(shape, recompute=recompute, tiling=tiling, offload=offload)


def _last_resorts(question: SearchRequest, shape: Layout) -> Iterator[Layout]:
    """Yield a shape with its parameters sharded, and with Adam on the host."""
    _, both = _tilings(question, shape)
    _, everything = _offloads(question)
    if shape.pp == 1:  # Megatron FSDP: no tiled loss, no pipeline
        sharded = replace(shape, sharding="parameters", recompute=KEPT)
        yield sharded
        yield replace(sharded, tiling=Tiling(mlp=both.mlp), offload=everything)
    yield replace(shape, recompute=KEPT, tiling=both, offload=everything, optimizer_offload=1.0)


def why_not(question: SearchRequest, answer: SearchResult) -> str:
    """Return what is lacking if nothing fits, how much, and the cheapest change that helps."""
    card, cluster = question.card, question.cluster
    said = (
        f"no layout of {card.name} at {question.seq_length:,} tokens fits "
        f"{question.gpus} GPU{'s' if question.gpus > 1 else ''} of "
        f"{cluster.name}"
    )
    if answer.nearest is None:
        reasons = "; ".join(answer.ruled_out) or "nothing was left to try"
        change = _even_sizes(question)
        return f"{said}: {reasons}" + (f". {change}" if change else "")
    change = _cheapest_change(question)
    if answer.refused:
        return f"{said}: {answer.refused}" + (f". {change}" if change else "")
    return f"{said}; the nearest {lacks(answer.nearest)}" + (f". {change}" if change else "")


def lacks(one: Plan) -> str:
    """Return as text what a plan that does not fit lacks."""
    short_of = []
    if one.short > 0:
        short_of.append(f"{one.short / GiB:.1f} GiB of GPU memory")
    if one.host_short > 0:
        short_of.append(f"{one.host_short / GiB:.1f} GiB of host memory a rank")
    return f"lacks {' and '.join(short_of)}"


def _even_sizes(question: SearchRequest) -> str:
    """Return as text the nearest number of GPUs, batch or length that divides and fits."""
    sequences = question.tokens_per_batch // question.seq_length
    gpus = question.gpus
    fewer = 2 ** (gpus.bit_length() - 1)
    odd = _odd_part(gpus)
    tried = [
        (f"{fewer} GPUs would do", replace(question, gpus=fewer)),
        *(
            (
                f"a batch of {count:,} sequences ({count * question.seq_length:,} tokens) would do",
                replace(question, tokens_per_batch=count * question.seq_length),
            )
            for count in (sequences // odd * odd, (sequences // odd + 1) * odd)
            if count
        ),
    ]
    even = question.seq_length // K * K
    if even and even != question.seq_length:
        shorter = replace(question, seq_length=even, tokens_per_batch=sequences * even)
        tried.append((f"{even:,} tokens would do", shorter))
    return ", or ".join(words for words, other in tried if fits_somehow(other))


def _odd_part(number: int) -> int:
    return number // (number & -number)


def even_batch(tokens: int, seq_length: int, gpus: int) -> int:
    """Return about `tokens` tokens: whole sequences for as many data ranks as possible."""
    sequences, odd = max(tokens // seq_length, 1), _odd_part(gpus)
    return (sequences - sequences % odd or sequences) * seq_length


def _cheapest_change(question: SearchRequest) -> str:
    """Return as text the smallest change of GPUs or length that makes it fit."""
    found = []
    gpus = question.gpus
    while 2 * gpus <= min(MOST_GPUS * question.gpus, LARGEST_CLUSTER):
        gpus *= 2
        if fits_somehow(replace(question, gpus=gpus)):
            found.append(f"{gpus} GPUs would do")
            break
    longest = max_length(question)
    if longest:
        found.append(f"these GPUs reach {longest:,} tokens")
    said = ", or ".join(found)
    return said[:1].upper() + said[1:]


def fits_somehow(question: SearchRequest) -> bool:
    """Whether any layout fits; only the smallest choices of each shape are tried."""
    for shape in _shapes(question, Counter()):
        smallest = (*list(_keeping(question, shape))[-2:], *_last_resorts(question, shape))
        for layout in smallest:
            workload = question.workload(layout)
            if max(short(memory(workload), question.cluster)) > 0:
                continue
            if not before_planning(workload, question.cluster):
                return True
    return False


def longest(fits: Callable[[int], bool]) -> int:
    """Return the longest context that fits, in eighths of a power of two; 0 if none fits."""
    length = K
    if not fits(length):
        return 0
    while length < 2**31 and fits(2 * length):
        length *= 2
    step = length // 8
    return max(length + n * step for n in range(8) if n == 0 or fits(length + n * step))


def max_length(question: SearchRequest) -> int:
    """Return the longest context that fits in any layout; 0 if none fits."""
    return longest(lambda length: fits_somehow(at_length(question, length)))


def at_length(question: SearchRequest, length: int) -> SearchRequest:
    """Return the question at another length, with about as many tokens per batch."""
    batch = even_batch(question.tokens_per_batch, length, question.gpus)
    return replace(question, seq_length=length, tokens_per_batch=batch)
