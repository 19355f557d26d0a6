# SPDX-License-Identifier: Apache-2.0
"""Held-out documents of several sources in turn, and the counts of a store's tokens."""

from collections import Counter

import numpy as np
import pytest

from data.adoption.adopt import adopt
from data.adoption.checks import HeldOut
from data.adoption.pairs import Named
from data.store import Manifest
from data.token_files import token_counts as counting
from data.token_files.held_out import documents_in_turn, long_documents
from data.token_files.token_counts import token_counts


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory, shared_store: Manifest) -> Manifest:
    """Return a store of two sources, each with held-out documents."""
    named = [
        Named(path=shared_store.prefixes(split)[0], name=name)
        for split, name in (("train", "many"), ("heldout", "few"))
    ]
    out = tmp_path_factory.mktemp("in turn") / "store"
    tokenizer = str(shared_store.tokenizer_path)
    return adopt(named, out, tokenizer=tokenizer, heldout=HeldOut(documents=2))


def test_sources_take_turns_until_each_has_no_more_documents(several: Manifest) -> None:
    in_turn = list(documents_in_turn(several, min_tokens=1))
    counts = {part.source: part.documents for part in several.heldout.parts}
    assert set(counts) == {"many", "few"}
    for place in range(0, 2 * min(counts.values()), 2):
        assert [source for source, _ in in_turn[place : place + 2]] == ["many", "few"]
    assert Counter(source for source, _ in in_turn) == counts
    by_source = [text for name in counts for source, text in in_turn if source == name]
    for text, expected in zip(by_source, long_documents(several, min_tokens=1), strict=True):
        assert np.array_equal(text, expected)


def test_documents_of_one_source_are_in_the_order_of_the_store(shared_store: Manifest) -> None:
    in_turn = documents_in_turn(shared_store, min_tokens=40)
    expected = long_documents(shared_store, min_tokens=40)
    for (_, text), document in zip(in_turn, expected, strict=True):
        assert np.array_equal(text, document)


def test_every_token_of_a_small_split_is_counted(several: Manifest, monkeypatch) -> None:
    monkeypatch.setattr(counting, "AT_ONCE", 100)
    expected = Counter(
        token
        for text in long_documents(several, min_tokens=1, split="train")
        for token in text.tolist()
    )
    counts = token_counts(several)
    assert len(counts) == several.tokenizer.vocab_size
    assert {token: int(counts[token]) for token in np.flatnonzero(counts)} == expected


def test_a_sample_of_a_larger_split_is_of_each_source_in_its_share(several: Manifest) -> None:
    tokens = several.train.tokens
    counted = int(token_counts(several, most=tokens // 2).sum())
    assert tokens / 4 < counted < tokens * 0.7
