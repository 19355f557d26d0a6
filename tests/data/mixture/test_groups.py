# SPDX-License-Identifier: Apache-2.0
"""What a store cannot give is told from its manifest, with the tokens that are missing."""

import pytest

from data.mixture.config import Mix, OtherLength, Share
from data.mixture.groups import MixError, applies, groups, needs, often_repeated
from data.mixture.stage_rows import for_store
from data.store import Manifest

BOTH = (Share(source="web", weight=3.0), Share(source="books", weight=1.0))


def test_without_shares_every_source_weighs_what_it_has(two_sources: Manifest) -> None:
    found = groups(Mix(), two_sources, 64)
    total = two_sources.train.tokens
    assert [group.weight for group in found] == [
        pytest.approx(part.tokens / total) for part in two_sources.train.parts
    ]


def test_long_documents_get_their_share_of_every_source(two_sources: Manifest) -> None:
    mix = Mix(shares=BOTH, long_from=16, long_share=0.8)
    found = {group.words: group.weight for group in groups(mix, two_sources, 64)}
    assert found == {
        "web below 16": pytest.approx(0.75 * 0.2),
        "web from 16": pytest.approx(0.75 * 0.8),
        "books": pytest.approx(0.25),  # all of them are long
    }


def test_each_length_has_the_same_weights(two_sources: Manifest) -> None:
    mix = Mix(shares=BOTH, other_lengths=[OtherLength(seq_length=16, steps=0.5)])
    found = [(group.seq_length, group.weight) for group in groups(mix, two_sources, 64)]
    assert found == [(64, 0.75), (64, 0.25), (16, 0.75), (16, 0.25)]


def test_a_source_that_is_missing_is_named_with_those_there_are(two_sources: Manifest) -> None:
    with pytest.raises(MixError, match="no source code, which the mix takes; it has web, books"):
        applies(Mix(shares=(*BOTH, Share(source="code", weight=1))), two_sources)


def test_a_store_of_one_unnamed_source_takes_the_rest_of_a_mix(shared_store: Manifest) -> None:
    mix = Mix(shares=BOTH, documents_per_row=3)
    assert for_store(mix, shared_store) == Mix(documents_per_row=3)


def test_a_weight_on_lengths_that_no_document_has_is_refused(two_sources: Manifest) -> None:
    mix = Mix(shares=[Share(source="books", weight=1, at_least=1024)])
    with pytest.raises(MixError, match="no training documents of books from 1,024 tokens; those"):
        groups(mix, two_sources, 64)


def test_repeats_are_counted_and_capped_with_the_tokens_that_are_missing(
    two_sources: Manifest,
) -> None:
    mix = Mix(shares=BOTH)
    books = two_sources.train.parts[1].tokens
    rows = needs(mix, groups(mix, two_sources, 64), 20 * books)
    assert [need.repeats for need in rows if need.words == "books"] == [pytest.approx(5, abs=0.01)]
    (said,) = (words for words in often_repeated(rows) if words.startswith("books"))
    assert said.startswith(f"books has {books:,} tokens and is seen 5.0 times; beyond 4 times")
    capped = Mix(shares=(BOTH[1],), most_repeats=2)
    with pytest.raises(MixError, match=rf"{8 * books:,} are missing at most_repeats 2"):
        needs(capped, groups(capped, two_sources, 64), 10 * books)


def test_a_ramp_counts_with_the_weights_on_its_way(two_sources: Manifest) -> None:
    mix = Mix(shares=[BOTH[0], Share(source="books", weight=0, end_weight=3.0)], ramp_from=0)
    rows = {need.words: need.share for need in needs(mix, groups(mix, two_sources, 64), 1000)}
    assert rows == {"web": pytest.approx(0.75), "books": pytest.approx(0.25)}


def test_more_than_forty_repeats_are_refused_unless_the_mix_allows_them(
    two_sources: Manifest,
) -> None:
    tokens = 41 * two_sources.train.parts[1].tokens
    mix = Mix(shares=(BOTH[1],))
    with pytest.raises(MixError, match=r"books .* seen 41 times, .* most_repeats: 41 in the mix"):
        needs(mix, groups(mix, two_sources, 64), tokens)
    for allowed in (
        Mix(shares=(BOTH[1],), most_repeats=41),
        Mix(),
    ):  # and one that takes all equally
        assert needs(allowed, groups(allowed, two_sources, 64), tokens)
