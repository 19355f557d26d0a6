# SPDX-License-Identifier: Apache-2.0
"""Documents hashed all at once have the hash of each by itself, written with Python's integers."""

import numpy as np
import pytest

from data.token_files import document_scan
from data.token_files.document_scan import scan, shares

BITS = 2**64 - 1
STEP = 0x9E3779B97F4A7C15


def mixed(number: int) -> int:
    number ^= number >> 30
    number = number * 0xBF58476D1CE4E5B9 & BITS
    number ^= number >> 27
    number = number * 0x94D049BB133111EB & BITS
    return number ^ (number >> 31)


def hash_of(ids: list[int]) -> int:
    total = sum(mixed((token + place * STEP) & BITS) for place, token in enumerate(ids))
    return mixed((total + len(ids) * STEP) & BITS)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_each_hash_is_that_of_the_document_alone(monkeypatch, dtype) -> None:
    monkeypatch.setattr(document_scan, "CHUNK", 50)
    random = np.random.default_rng(1)
    lengths = random.integers(1, 20, 40).astype(np.int32)
    lengths[[3, 17]] = 50, 173  # a document that fills a chunk, and one of several chunks
    ends = np.cumsum(lengths, dtype=np.int64)
    tokens = random.integers(0, 300, ends[-1]).astype(dtype)
    starts = ends - lengths
    order = random.permutation(40)  # documents in another order than in the file
    for chosen in (np.arange(40), order):
        seen: list[tuple[int, int]] = []
        facts = scan(
            tokens, starts[chosen], lengths[chosen], int(tokens[ends[5] - 1]),
            lambda documents, read, seen=seen: seen.append((documents, read)),
        )  # fmt: skip
        documents = [tokens[starts[one] : ends[one]].tolist() for one in chosen]
        assert facts.hashes.tolist() == [hash_of(ids) for ids in documents]
        assert facts.ended.tolist() == [ids[-1] == tokens[ends[5] - 1] for ids in documents]
        assert (facts.smallest, facts.largest) == (tokens.min(), tokens.max())
        assert seen[-1] == (40, ends[-1])


def test_order_and_length_change_a_hash_and_the_place_does_not() -> None:
    tokens = np.array([1, 2, 3, 2, 1, 3, 1, 2, 3, 0], dtype=np.uint16)
    facts = scan(tokens, np.array([0, 3, 6, 6]), np.array([3, 3, 3, 4], dtype=np.int32), 0)
    first, swapped, again, longer = facts.hashes
    assert first == again
    assert len({first, swapped, longer}) == 3
    assert facts.ended.tolist() == [False, False, False, True]


def test_shares_are_uniform_and_differ_by_seed() -> None:
    hashes = np.arange(100_000, dtype=np.uint64)
    share = shares(hashes, 0)
    assert share.min() >= 0
    assert share.max() < 1
    counts = np.histogram(share, 10, (0, 1))[0]
    assert abs(counts - 10_000).max() < 400
    assert np.corrcoef(share, shares(hashes, 1))[0, 1] < 0.02
    assert hashes[7] == 7  # not changed in place
