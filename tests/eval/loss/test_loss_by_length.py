# SPDX-License-Identifier: Apache-2.0
"""Documents of each power of two of tokens, few enough to be measured while training."""

import pytest

from data.store import Manifest
from data.token_files.held_out import documents_in_turn
from eval.loss.loss_by_length import MOST_DOCUMENTS, documents_by_length, windows_read


@pytest.mark.parametrize("window", [128, 512, 2048])
def test_each_length_has_documents_that_a_window_reads_whole(store_of_lengths, window):
    manifest = Manifest.load(store_of_lengths)
    found = documents_by_length(manifest, window)
    lengths = [len(text) for _, text in documents_in_turn(manifest, min_tokens=1)]
    held = {1 << (tokens.bit_length() - 1) for tokens in lengths if 64 <= tokens <= window + 1}
    assert set(found) <= held
    assert found.keys() >= {64 << power for power in range(6) if 128 << power <= window}
    assert {length for length in held if length < window} <= set(found)
    for length, documents in found.items():
        assert all(length <= len(text) < min(2 * length, window + 2) for text in documents)
        assert len(documents) <= MOST_DOCUMENTS
        assert len(documents) == 1 or sum(map(len, documents)) <= window / 2


def test_reading_is_counted_by_the_rank_that_reads_most():
    documents = {64: [range(100)] * 3, 128: [range(200)]}
    assert windows_read(documents, window=100, ranks=1) == 3 + 2
    assert windows_read(documents, window=100, ranks=2) == 2 + 2
