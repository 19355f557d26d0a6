# SPDX-License-Identifier: Apache-2.0
"""Relation of tokens, sequence length, micro-batch, accumulation and data ranks of a step.

    tokens = sequence length x global batch        global batch = micro-batch x accumulation x DP

Papers keep the tokens per batch constant as sequences grow longer. Any three of tokens, length, DP
and accumulation (with a micro-batch) determine the fourth, or the nearest batches that divide.
"""

from dataclasses import dataclass
from math import prod

LEFT_OUT = 0.1
"""Share of the sequences that a batch may lose for more data ranks to divide it."""
MOST_TIMES = 16
"""Multiple of the requested tokens above which no batch is rounded up."""
MOST_ACCUMULATION = 32
"""Micro-batches per step on one data rank above which more data ranks are advised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One optimizer step."""

    seq_length: int
    micro_batch: int
    """Sequences in one forward pass."""
    accumulation: int
    """Micro-batches per step on each data rank."""
    dp: int

    @property
    def sequences(self) -> int:
        """Global batch size in sequences, as Megatron counts it."""
        return self.micro_batch * self.accumulation * self.dp

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.sequences * self.seq_length


def solve(
    *,
    tokens: int | None = None,
    seq_length: int | None = None,
    dp: int | None = None,
    accumulation: int | None = None,
    micro_batch: int = 1,
) -> Batch:
    """Return the batch given three of tokens, length, DP and accumulation.

    Raises ValueError for more or fewer, for numbers below 1, and, with the nearest valid batches,
    if the tokens do not divide.
    """
    parts = {"sequence length": seq_length, "DP": dp, "accumulation": accumulation}
    given = {"tokens per batch": tokens, **parts, "micro-batch": micro_batch}
    for name, value in given.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    unknown = [name for name, value in given.items() if value is None]
    if len(unknown) != 1:
        raise ValueError(
            f"any three of {', '.join(list(given)[:4])} give the fourth; "
            + (f"{', '.join(unknown)} are missing" if unknown else "leave one of them out")
        )
    known = {name: value for name, value in parts.items() if value is not None}
    if tokens is not None:
        known["micro-batch"] = micro_batch
        wanted = unknown[0]
        unit = prod(known.values())
        parts[wanted], rest = divmod(tokens, unit)
        if rest:
            raise ValueError(_nothing_divides(tokens, known, wanted))
    length, ranks, forwards = (value for value in parts.values() if value is not None)
    return Batch(seq_length=length, micro_batch=micro_batch, accumulation=forwards, dp=ranks)


def data_ranks(*, gpus: int, tp: int = 1, cp: int = 1, pp: int = 1) -> int:
    """Return the number of replicas on `gpus` GPUs; raise ValueError if it is not whole."""
    for name, size in {"GPUs": gpus, "TP": tp, "CP": cp, "PP": pp}.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    replica = tp * cp * pp
    if gpus % replica:
        below = gpus // replica * replica
        nearest = " or ".join(f"{count:,}" for count in (below, below + replica) if count)
        raise ValueError(
            f"{gpus:,} GPUs are not a whole number of replicas of TP {tp} x CP {cp} x PP {pp} = "
            f"{replica:,}; take {nearest}"
        )
    return gpus // replica


def _nothing_divides(tokens: int, known: dict[str, int], wanted: str) -> str:
    unit = prod(known.values())
    product = " x ".join(f"{name} {value:,}" for name, value in known.items())
    below = tokens // unit
    nearest = [
        f"{count * unit:,} tokens ({_result(count, known, wanted)})"
        for count in (below, below + 1)
        if count
    ]
    return (
        f"{tokens:,} tokens per batch are not a multiple of {product} = {unit:,}; "
        f"nearest: {' or '.join(nearest)}"
    )


def _result(count: int, known: dict[str, int], wanted: str) -> str:
    length = known.get("sequence length")
    if length is None:
        return f"{wanted} {count:,}"
    sequences = count * prod(known.values()) // length
    return f"{sequences:,} sequence{'s' * (sequences > 1)}, {wanted} {count:,}"


def even_batch(tokens: int, seq_length: int, gpus: int) -> int:
    """Return about `tokens` tokens: whole sequences for as many data ranks as possible.

    They are the nearest multiple of the odd part of the GPUs, less up to `LEFT_OUT` of them for
    factors of two that the GPUs have too. If that batch could lose `LEFT_OUT` of its own for one
    more factor, it gets as many more instead, so the batch of a batch that was evened is the same.
    """
    sequences, unit = max(tokens // seq_length, 1), odd_part(gpus)
    if unit > MOST_TIMES * sequences:
        return sequences * seq_length
    rest = sequences % unit
    sequences += unit - rest if sequences < unit or rest > unit - rest else -rest
    while gpus % (2 * unit) == 0 and sequences % (2 * unit) < LEFT_OUT * sequences:
        unit *= 2
    sequences -= sequences % unit
    if gpus % (2 * unit) == 0 and unit < LEFT_OUT * sequences:
        sequences += unit
    return sequences * seq_length


def odd_part(number: int) -> int:
    """Return a number without its factors of two."""
    return number // (number & -number)
