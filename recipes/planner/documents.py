# SPDX-License-Identifier: Apache-2.0
"""Attention within documents of uneven length: its work, and the wait for the longest documents.

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
"""

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
    """Tokens of the document that a token is in, on average over tokens."""
    short: bool


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
        self, *, seq_length: int, ring: int, data_ranks: int, sequences: int, block: float
    ) -> Attended:
        """Return the shares for sequences of so many tokens on so many ranks.

        `sequences` are those of a step on a data rank, `block` is the length in tokens at which
        kernels reach half of their rate.
        """
        squares = sum(_squares(length, seq_length) * number for length, number in self.counts)
        mean = (squares / self.tokens + block) / (seq_length + block)
        balanced, costs = _costs(self, seq_length, ring, block)
        waiting = max(0.0, _slowest(costs, data_ranks, sequences) - balanced)
        return Attended(squares / self.tokens / seq_length, mean, min(1.0, mean + waiting))


def _squares(length: int, seq_length: int) -> float:
    """Return the sum of squares of the parts of a document, on average over where it is cut."""
    if length <= seq_length:
        return length**2 * (1 - length / (3 * seq_length))
    return length * seq_length - seq_length**2 / 3


@lru_cache(maxsize=128)
def _costs(
    lengths: DocumentLengths, seq_length: int, ring: int, block: float
) -> tuple[float, tuple[float, ...]]:
    """Return the average time of the sequences, and the time of each in a ring."""
    rows = sequences_of(lengths, seq_length)
    whole, chunk = seq_length * (seq_length + block), seq_length / (2 * ring)
    costs = [
        sum((part.end - part.first) * (part.attended + block) for part in row) / whole
        for row in rows
    ]
    balanced = sum(costs) / len(costs)
    if ring > 1:
        costs = [cost * _fullest(row, chunk, ring) for cost, row in zip(costs, rows, strict=True)]
    return balanced, tuple(costs)


@lru_cache(maxsize=32)
def sequences_of(lengths: DocumentLengths, seq_length: int) -> list[list[Part]]:
    """Return sequences that each begin anywhere in the documents in random order."""
    short = [pair for pair in lengths.counts if pair[0] * SHORT < seq_length]
    long = [pair for pair in lengths.counts if pair[0] * SHORT >= seq_length]
    tokens = sum(length * number for length, number in short)
    squares = sum(length**2 * number for length, number in short)
    each = squares / tokens if short else 0.0
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
                row.append(Part(at, end, end - at, short=False))
                at = end
            end = min(at + draw.expovariate(1 / gap) if gap else at, seq_length)
            end = end if long else seq_length
            if end > at:
                row.append(Part(at, end, each, short=True))
                at = end
            rest = draw.choices(values, numbers)[0] if long else 0.0
        rows.append(row)
    return rows


def _fullest(row: list[Part], chunk: float, ring: int) -> float:
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
                of_chunk[number] += (until - part.first) ** 2 - (begin - part.first) ** 2
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
