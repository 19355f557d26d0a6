# SPDX-License-Identifier: Apache-2.0
"""The first job of a chain: a store that could not be evaluated ends the chain there."""

import pytest

from longhaul.jobs.store_source import prepare_for
from recipes.spec.gate import GateShutError


def prepared(folder, length):
    """Prepare a store of a hundred documents, each of some hundred tokens."""
    books = folder / "books"
    books.mkdir(exist_ok=True)
    for number in range(100):
        (books / f"{number}.txt").write_text(f"{number} little words that go on. " * 30)
    out = folder / "store"
    prepare_for(length, source=str(books), out=str(out), tokenizer=None, vocab_size=300)
    return out


def test_a_store_that_is_long_enough_is_made_once_and_taken_again(tmp_path):
    manifest = prepared(tmp_path, 32) / "manifest.json"
    before = manifest.stat().st_mtime_ns
    prepared(tmp_path, 32)
    assert manifest.stat().st_mtime_ns == before


def test_held_out_documents_that_are_too_short_shut_the_gate(tmp_path):
    with pytest.raises(GateShutError, match=r"evaluation at 1,048,576 needs a longer one"):
        prepared(tmp_path, 2**20)
