# SPDX-License-Identifier: Apache-2.0
"""Documents are counted by the power of two of their length."""

import numpy as np

from data.splits import LengthBucket, merge_buckets
from data.token_files import length_counts
from data.token_files.length_counts import LengthCounts, counts_of


def test_a_document_is_counted_in_the_bucket_of_its_power_of_two() -> None:
    counts = counts_of(np.array([1, 8191, 8192, 8193, 16383, 16384, 2**31 - 1], dtype=np.int32))
    assert counts.buckets() == (
        LengthBucket(at_least=1, documents=1, tokens=1),
        LengthBucket(at_least=4096, documents=1, tokens=8191),
        LengthBucket(at_least=8192, documents=3, tokens=8192 + 8193 + 16383),
        LengthBucket(at_least=16384, documents=1, tokens=16384),
        LengthBucket(at_least=2**30, documents=1, tokens=2**31 - 1),
    )
    assert (counts.documents, counts.longest) == (7, 2**31 - 1)
    assert counts.tokens == 1 + 8191 + 8192 + 8193 + 16383 + 16384 + 2**31 - 1


def test_counts_in_pieces_and_by_length_are_those_of_all_documents(monkeypatch) -> None:
    monkeypatch.setattr(length_counts, "AT_ONCE", 7)
    lengths = np.random.default_rng(0).integers(1, 3_000, size=200).astype(np.int32)
    parts, table = LengthCounts(), LengthCounts()
    for part in np.split(lengths, [3, 90]):
        parts.add(part)
    table.add(*np.unique(lengths.astype(np.int64), return_counts=True))
    whole = counts_of(lengths).buckets()
    assert parts.buckets() == table.buckets() == whole
    assert merge_buckets([counts_of(part).buckets() for part in np.split(lengths, [9])]) == whole
    assert LengthCounts().buckets() == ()
