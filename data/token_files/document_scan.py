# SPDX-License-Identifier: Apache-2.0
"""Read the tokens of documents once, in threads: a hash of each, the range of ids, their ends.

The hash of a document depends on its token ids and their order alone, whatever the integer type and
the place in the file: each id is mixed with its position to 64 bits (two multiplications and
shifts, as in SplitMix64), the results are added modulo 2**64, and the sum is mixed with the length.
Addition lets numpy hash all documents of a chunk at once, and a document that is longer than a
chunk in pieces. Two different documents share a hash with a probability of about 2**-64, so among
n documents n**2 / 2**65 such pairs are expected: 3e-6 for 10 million, 0.03 for a billion.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.token_files.tokens import TokenArray, Tokens

CHUNK = 2**18
"""Tokens read at once: 2 MiB of 64-bit numbers, which stay in a core's cache."""
MOST_THREADS = 16
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_RAMP = np.arange(CHUNK, dtype=np.uint64) * _STEP

Advance = Callable[[int, int], None]
"""Receives the documents and tokens read so far."""


@dataclass(frozen=True, slots=True)
class DocumentScan:
    """Facts of documents, in their order."""

    hashes: NDArray[np.uint64]
    begun: NDArray[np.bool_]
    """Whether the first token is the one that a tokenizer puts first."""
    ended: NDArray[np.bool_]
    """Whether the last token is the end-of-document token."""
    smallest: int
    largest: int
    """The smallest and the largest token id of all documents."""


def scan(
    tokens: TokenArray,
    starts: NDArray[np.int64],
    lengths: NDArray[np.int32],
    eod_id: int,
    advance: Advance | None = None,
    first_id: int = -1,
) -> DocumentScan:
    """Read documents of at least one token each.

    Args:
        tokens: the token files, mapped into memory.
        starts: the place of each document's first token.
        first_id: the token that is looked for there; -1 for none.
    """
    count = len(lengths)
    hashes = np.zeros(count, dtype=np.uint64)
    begun, ended = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
    smallest, largest = 2**63 - 1, -(2**63)
    done_documents = done_tokens = 0

    def read(first: int, stop: int) -> tuple[int, int, int, int]:
        some = slice(first, stop)
        begins, sizes = starts[some].astype(np.int64), lengths[some].astype(np.int64)
        if stop == first + 1:
            facts = _of_one(tokens[begins[0] : begins[0] + sizes[0]])
        else:
            facts = _of_several(_values(tokens, begins, sizes), sizes)
        hashes[some] = facts[0]
        begun[some], ended[some] = facts[1] == first_id, facts[2] == eod_id
        return stop - first, int(sizes.sum()), facts[3], facts[4]

    for result in _in_threads(read, _chunks(lengths)):
        done_documents += result[0]
        done_tokens += result[1]
        smallest, largest = min(smallest, result[2]), max(largest, result[3])
        if advance is not None:
            advance(done_documents, done_tokens)
    return DocumentScan(hashes, begun, ended, smallest, largest)


def shares(hashes: NDArray[np.uint64], seed: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each hash, another one for another seed."""
    keyed = hashes ^ _mixed(np.full(1, seed, dtype=np.uint64) + _STEP)
    return (_mixed(keyed) >> np.uint64(11)).astype(np.float64) / 2**53


def _chunks(lengths: NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """Yield ranges of documents with at most `CHUNK` tokens, or with one longer document."""
    at_once = 2**20
    for block in range(0, len(lengths), at_once):
        ends = np.cumsum(lengths[block : block + at_once], dtype=np.int64)
        first = 0
        while first < len(ends):
            before = int(ends[first - 1]) if first else 0
            stop = max(int(np.searchsorted(ends, before + CHUNK, side="right")), first + 1)
            yield block + first, block + stop
            first = stop


def _in_threads(
    read: Callable[[int, int], tuple[int, int, int, int]], ranges: Iterator[tuple[int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the results in order; only a few more ranges than threads wait at any time."""
    threads = min(os.cpu_count() or 1, MOST_THREADS)
    waiting: deque[Future[tuple[int, int, int, int]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="scan") as pool:
        try:
            for first, stop in ranges:
                waiting.append(pool.submit(read, first, stop))
                if len(waiting) > 4 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _values(tokens: TokenArray, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Tokens:
    """Return the tokens of documents one after another; one slice where they lie so in the file."""
    ends = starts + lengths
    gaps = np.flatnonzero(starts[1:] != ends[:-1])
    first, last = starts[np.append(0, gaps + 1)], ends[np.append(gaps, len(ends) - 1)]
    runs = [tokens[begin:end] for begin, end in zip(first, last, strict=True)]
    return runs[0] if len(runs) == 1 else np.concatenate(runs)


def _of_several(
    values: Tokens, lengths: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], Tokens, Tokens, int, int]:
    """Return hashes, first and last tokens, and the smallest and largest id."""
    ends = np.cumsum(lengths)
    offsets = ends - lengths
    mixed = values.astype(np.uint64)
    mixed += _RAMP[: len(values)]
    mixed -= np.repeat(offsets.astype(np.uint64) * _STEP, lengths)
    sums = np.add.reduceat(_mixed(mixed), offsets)
    hashes = _mixed(sums + lengths.astype(np.uint64) * _STEP)
    return hashes, values[offsets], values[ends - 1], int(values.min()), int(values.max())


def _of_one(
    values: Tokens,
) -> tuple[NDArray[np.uint64], Tokens, Tokens, int, int]:
    """Return the same facts of one document, which may be longer than a chunk."""
    total = np.zeros(1, dtype=np.uint64)
    smallest, largest = 2**63 - 1, -(2**63)
    for start in range(0, len(values), CHUNK):
        piece = np.asarray(values[start : start + CHUNK])
        mixed = piece.astype(np.uint64)
        mixed += _RAMP[: len(piece)]
        mixed += np.full(1, start, dtype=np.uint64) * _STEP
        total += _mixed(mixed).sum(dtype=np.uint64)
        smallest, largest = min(smallest, int(piece.min())), max(largest, int(piece.max()))
    hashes = _mixed(total + np.full(1, len(values), dtype=np.uint64) * _STEP)
    return hashes, np.asarray(values[:1]), np.asarray(values[-1:]), smallest, largest


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of numbers, in place where the caller's array may be reused."""
    numbers ^= numbers >> np.uint64(30)
    numbers *= _FIRST
    numbers ^= numbers >> np.uint64(27)
    numbers *= _SECOND
    numbers ^= numbers >> np.uint64(31)
    return numbers
