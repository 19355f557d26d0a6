# SPDX-License-Identifier: Apache-2.0
"""All sizes of TP (powers of two), CP, PP, DP and micro-batch that model, batch and GPUs admit.

Not searched: pipelines of more than `MOST_PP` stages.
"""

import math
from collections import Counter
from collections.abc import Iterator

from custom_modules.context_parallel.config import fits_ulysses, stage_sizes
from recipes.constraints.layers import evenly_full
from recipes.planner.search.request import SearchRequest
from recipes.spec import pipeline
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.units import K

MOST_PP, MICRO_BATCHES = 16, (1, 2, 4)
UNEVEN_SEQUENCE = "2 x CP x TP does not divide a sequence of {:,} tokens"
UNEVEN_BATCH = "DP does not divide a batch of {:,} sequences"
CUT_PATTERN = "PP {} has stages with different numbers of full layers"
LARGEST_CLUSTER = 2**20
"""Largest number of GPUs that is planned for."""
MICRO_BATCH_BELOW = 16 * K
"""Tokens per rank below which larger micro-batches are tried."""
RING_BY_HEADS_ABOVE = 512 * K
"""Tokens per rank above which a ring takes one head at a time: it holds the least of all kinds."""


def parallel_sizes(question: SearchRequest, ruled_out: Counter[str]) -> Iterator[Layout]:
    """Yield layouts with all sizes of parallelism, without recompute, tiling and offload.

    Sizes that divide neither heads nor tokens are counted in `ruled_out` by reason.
    """
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
        for pp in divisors(gpus // tp if gpus % tp == 0 else 1):
            if pp > MOST_PP or not pipeline.divides(pp, card.layers) or gpus % (tp * pp):
                continue
            if cuts(card, question.seq_length, pp):
                ruled_out[CUT_PATTERN.format(pp)] += 1
                continue
            for cp in divisors(gpus // (tp * pp)):
                dp = gpus // (tp * pp * cp)
                if question.seq_length % (cp * tp * (2 if cp > 1 else 1)):
                    ruled_out[UNEVEN_SEQUENCE.format(question.seq_length)] += 1
                elif sequences % dp:
                    ruled_out[UNEVEN_BATCH.format(sequences)] += 1
                else:
                    yield from _of_sizes(question, tp, pp, cp, dp, sequences)


def cuts(card: ModelCard, seq_length: int, pp: int, vpp: int = 1) -> bool:
    """Whether pipeline stages would have different numbers of layers without a window."""
    pattern = card.pattern
    if pattern is None or pattern.window is None or pattern.window >= seq_length:
        return False
    return not evenly_full(pattern, card.layers, pp, vpp)


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


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
            for ep, etp in _experts(question, tp, tp * cp * dp):
                yield Layout(
                    tp=tp,
                    cp=kind,
                    pp=pp,
                    dp=dp,
                    ep=ep,
                    etp=etp,
                    micro_batch=micro,
                    fp8=question.fp8,
                )


def _experts(question: SearchRequest, tp: int, ranks: int) -> Iterator[tuple[int, int | None]]:
    """Yield EP and ETP on the ranks of a pipeline stage, first without EP.

    Sizes of EP double on the ranks that the fast link joins; beyond, only the largest is tried.
    With EP each expert is whole, or split as the other layers are.
    """
    yield 1, None
    if not question.card.facts.experts:
        return
    for etp in sorted({1, tp}):
        sizes = [
            ep
            for ep in _powers(min(question.card.experts, ranks // etp))[1:]
            if question.card.experts % ep == 0 and ranks % (etp * ep) == 0
        ]
        for ep in sizes:
            if ep == sizes[-1] or question.cluster.joins(etp * ep, question.gpus):
                yield ep, None if etp == tp else etp


def _kinds(question: SearchRequest, tp: int, cp: int) -> Iterator[ContextParallel]:
    """Yield the kinds of context parallelism for the heads of a TP rank."""
    heads, kv_heads = question.card.heads // tp, question.card.kv_heads // tp
    chunks = not question.card.facts.wide_qk_norm
    if cp == 1:
        yield ContextParallel.ulysses(1)
        if chunks:
            yield ContextParallel.head_chunked(1)
        return
    if fits_ulysses(heads, kv_heads, cp):
        yield ContextParallel.ulysses(cp)
        if chunks and stage_sizes(heads, kv_heads, cp)[0] < heads:
            yield ContextParallel.head_chunked(cp)
    yield ContextParallel.ring(cp)
    if chunks and heads > 1 and question.seq_length // cp > RING_BY_HEADS_ABOVE:
        yield ContextParallel.hybrid(ulysses=1, ring=cp, heads_per_stage=1)
    inside = [
        size
        for size in divisors(cp)
        if 1 < size <= min(cp // 2, question.cluster.linked_gpus // tp)
        and fits_ulysses(heads, kv_heads, size)
    ]
    if inside:
        yield ContextParallel.hybrid(ulysses=inside[-1], ring=cp // inside[-1])
        stage = stage_sizes(heads, kv_heads, inside[-1])[0]
        if chunks and stage < heads:
            yield ContextParallel.hybrid(
                ulysses=inside[-1], ring=cp // inside[-1], heads_per_stage=stage
            )
