# SPDX-License-Identifier: Apache-2.0
"""Attention within documents of uneven length or a window: its work, and the wait for the longest.

Training cuts documents in random order into sequences of S tokens, and takes those in random
order (Megatron's `GPTDataset`). If tokens attend only within their document, a part of l tokens
takes l (l + b) of the S (S + b) units of a whole sequence: its causal pairs, at kernels that reach
half of their rate at b tokens (`Efficiency.ring_block`).

    mean        average over sequences: the attention of a step, if it were balanced
    slowest     average over steps of the data rank with the largest sum, which the others wait for;
                in a ring, each sequence counts as that of the context rank with most pairs

Where the cuts fall is uniform, so the parts of a document of l tokens have l^2 (1 - l / 3S) pairs
on average, or l S - S^2 / 3 if it is longer than a sequence, which gives the mean exactly. The
wait for the slowest is that of sequences drawn with a fixed seed. An all-to-all gives each context
rank whole sequences of some heads, so it stays balanced. Micro-batches of uneven length also
enlarge the bubble of a pipeline, which is not modelled.

In a layer with a window of W tokens, a part of l > W tokens has 2 W l - W^2 pairs in place of l^2.
Kernels compute them in squares of W tokens (`custom_modules.attention.window`), l / W on the
diagonal and l / W - 1 before it, each of W (W + b) units.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import NamedTuple

SEQUENCES, STEPS, MOST_DRAWN = 512, 16, 4_000
"""Sequences that are made; steps that are drawn from them, of at most so many sequences in all."""
SHORT = 64
"""Documents shorter than this part of a sequence count by the average of their tokens."""


class Part(NamedTuple):
    """A document's part of a sequence, or short documents in a row."""

    first: float
    """Place in the sequence of its first token."""
    end: float
    attended: float
    """Tokens of the document that a token is in, on average over tokens; in a window those whose
    causal attention has its pairs."""
    short: bool
    squares: float = 1.0
    """Squares of a window that a token is a query of; 1 without a window."""


class Attended(NamedTuple):
    """Attention within documents, as shares of that over whole sequences."""

    pairs: float
    """Pairs of tokens: model FLOPs."""
    mean: float
    """Time of the average sequence."""
    slowest: float
    """Time of the data rank that the others wait for."""


WHOLE = Attended(pairs=1.0, mean=1.0, slowest=1.0)


@dataclass(frozen=True)
class DocumentLengths:
    """Lengths of documents, each with the number of documents that have it."""

    counts: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        """Raise ValueError if there are no documents, or lengths or numbers below 1."""
        if not self.counts or any(min(pair) < 1 for pair in self.counts):
            raise ValueError(f"document lengths are {self.counts}; each is at least 1, and one is")

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(length * number for length, number in self.counts)

    def attended(
        self,
        *,
        seq_length: int,
        ring: int,
        data_ranks: int,
        sequences: int,
        block: float,
        window: int | None = None,
    ) -> Attended:
        """Return the shares for sequences of so many tokens on so many ranks.

        `sequences` are those of a step on a data rank, `block` is the length in tokens at which
        kernels reach half of their rate. The shares of layers with a `window` are those of the same
        whole sequences without one.
        """
        pairs = sum(_squares(length, seq_length, window) * n for length, n in self.counts)
        calls = sum(_calls(length, seq_length, window) * n for length, n in self.counts)
        mean = (pairs / self.tokens + block * (calls / self.tokens)) / (seq_length + block)
        balanced, costs = _costs(self, seq_length, ring, block, window)
        waiting = max(0.0, _slowest(costs, data_ranks, sequences) - balanced)
        return Attended(pairs / self.tokens / seq_length, mean, min(max(1.0, mean), mean + waiting))


def in_window(window: int, *, seq_length: int, block: float) -> Attended:
    """Return the shares of a layer with a window in whole sequences, of one without."""
    if window >= seq_length:
        return WHOLE
    pairs, calls = pairs_of(seq_length, window), calls_of(seq_length, window)
    mean = (pairs + block * calls) / (seq_length * (seq_length + block))
    return Attended(pairs / seq_length**2, mean, mean)


def pairs_of(length: float, window: int | None) -> float:
    """Return twice the pairs of a part of `length` tokens: its square, or less with a window."""
    if window is None or length <= window:
        return length**2
    return 2 * window * length - window**2


def calls_of(length: float, window: int | None) -> float:
    """Return the queries of all squares that a part of `length` tokens is computed in."""
    return length if window is None or length <= window else 2 * length - window


def _squares(length: int, seq_length: int, window: int | None) -> float:
    """Return `pairs_of` the parts of a document, on average over where it is cut."""
    if window is not None and window < min(length, seq_length):
        return _over_cuts(length, seq_length, pairs_of, _sum_of_pairs, window)
    if length <= seq_length:
        return length**2 * (1 - length / (3 * seq_length))
    return length * seq_length - seq_length**2 / 3


def _calls(length: int, seq_length: int, window: int | None) -> float:
    """Return `calls_of` the parts of a document, on average over where it is cut."""
    if window is None or window >= min(length, seq_length):
        return length
    return _over_cuts(length, seq_length, calls_of, _sum_of_calls, window)


def _over_cuts(
    length: int,
    seq_length: int,
    of: Callable[[float, int], float],
    up_to: Callable[[float, int], float],
    window: int,
) -> float:
    """Return the average of `of` over where a document is cut; `up_to` is its integral from 0.

    A cut falls uniformly: a document that is shorter than a sequence has one with probability
    l / S, one that is longer has l / S of them, S apart.
    """
    if length <= seq_length:
        uncut = (1 - length / seq_length) * of(length, window)
        return uncut + 2 * up_to(length, window) / seq_length
    inner = (length / seq_length - 1) * of(seq_length, window)
    return inner + 2 * up_to(seq_length, window) / seq_length


def _sum_of_pairs(length: float, window: int) -> float:
    if length <= window:
        return length**3 / 3
    return window * length**2 - window**2 * length + window**3 / 3


def _sum_of_calls(length: float, window: int) -> float:
    if length <= window:
        return length**2 / 2
    return length**2 - window * length + window**2 / 2


@lru_cache(maxsize=128)
def _costs(
    lengths: DocumentLengths, seq_length: int, ring: int, block: float, window: int | None
) -> tuple[float, tuple[float, ...]]:
    """Return the average time of the sequences, and the time of each in a ring."""
    rows = sequences_of(lengths, seq_length, window)
    whole, chunk = seq_length * (seq_length + block), seq_length / (2 * ring)
    costs = [
        sum((part.end - part.first) * (part.attended + block * part.squares) for part in row)
        / whole
        for row in rows
    ]
    balanced = sum(costs) / len(costs)
    if ring > 1:
        fullest = (_fullest(row, chunk, ring, window) for row in rows)
        costs = [cost * most for cost, most in zip(costs, fullest, strict=True)]
    return balanced, tuple(costs)


@lru_cache(maxsize=32)
def sequences_of(
    lengths: DocumentLengths, seq_length: int, window: int | None = None
) -> list[list[Part]]:
    """Return sequences that each begin anywhere in the documents in random order."""
    short = [pair for pair in lengths.counts if pair[0] * SHORT < seq_length]
    long = [pair for pair in lengths.counts if pair[0] * SHORT >= seq_length]
    tokens = sum(length * number for length, number in short)
    each = sum(pairs_of(length, window) * n for length, n in short) / tokens if short else 0.0
    of_short = sum(calls_of(length, window) * n for length, n in short) / tokens if short else 1.0
    gap = tokens / sum(number for _, number in long) if long else 0.0
    values, numbers = [length for length, _ in long], [number for _, number in long]
    held = [length * number for length, number in long]
    draw, rows = Random(seq_length), []
    for _ in range(SEQUENCES):
        row: list[Part] = []
        at, rest = 0.0, 0.0
        if draw.random() * lengths.tokens >= tokens:  # begins in a long document
            rest = draw.choices(values, held)[0] * draw.random()
        while at < seq_length:
            if rest:
                end = min(at + rest, seq_length)
                row.append(_part(at, end, window))
                at = end
            end = min(at + draw.expovariate(1 / gap) if gap else at, seq_length)
            end = end if long else seq_length
            if end > at:
                row.append(Part(at, end, each, short=True, squares=of_short))
                at = end
            rest = draw.choices(values, numbers)[0] if long else 0.0
        rows.append(row)
    return rows


def _part(first: float, end: float, window: int | None) -> Part:
    length = end - first
    if window is None or length <= window:
        return Part(first, end, length, short=False)
    pairs, calls = pairs_of(length, window), calls_of(length, window)
    return Part(first, end, pairs / length, short=False, squares=calls / length)


def _fullest(row: list[Part], chunk: float, ring: int, window: int | None) -> float:
    """Return the pairs of the fullest ring rank over the average; rank r has chunks r and -1-r."""
    of_chunk = [0.0] * (2 * ring)
    for part in row:
        for number in range(int(part.first / chunk), 2 * ring):
            begin, until = max(part.first, number * chunk), min(part.end, (number + 1) * chunk)
            if begin >= until:
                break
            if part.short:
                of_chunk[number] += (until - begin) * part.attended
            else:
                ends = until - part.first, begin - part.first
                of_chunk[number] += pairs_of(ends[0], window) - pairs_of(ends[1], window)
    ranks = [of_chunk[rank] + of_chunk[-1 - rank] for rank in range(ring)]
    return max(ranks) * ring / sum(ranks)


@lru_cache(maxsize=1024)
def _slowest(costs: tuple[float, ...], ranks: int, sequences: int) -> float:
    """Return the average over steps of the largest average of a rank."""
    if ranks == 1:
        return sum(costs) / len(costs)
    draw, steps = Random(ranks), max(1, min(STEPS, MOST_DRAWN // (ranks * sequences)))
    largest = [
        max(sum(draw.choices(costs, k=sequences)) / sequences for _ in range(ranks))
        for _ in range(steps)
    ]
    return sum(largest) / steps
