# SPDX-License-Identifier: Apache-2.0
"""Needles are where they should be, and the tokens that are scored are their answers."""

from itertools import pairwise

import numpy as np
import pytest

from eval.rope_search.scored_text import (
    DIGITS,
    INSTRUCTION,
    NEEDLE,
    ScoredText,
    guess_nats,
    needle_texts,
    texts_past,
)

LENGTH = 2000
DOCUMENTS = [np.arange(1000, 4000), np.arange(5000, 7500)]


def encode(text: str) -> list[int]:
    """Return a token a character; documents here have tokens above all characters."""
    return [ord(character) for character in text]


def decode(tokens: np.ndarray) -> str:
    return "".join(chr(token) for token in tokens if token < 1000)


def needles(**given) -> list[ScoredText]:
    return needle_texts(encode, DOCUMENTS, **{"length": LENGTH, **given})


def test_each_answer_is_the_number_hidden_under_the_key_that_is_asked_for():
    for text in needles(needles=3):
        assert len(text.tokens) == len(text.scored) == LENGTH
        hidden = [
            decode(text.tokens).partition(f"The magic number of {key} is ")[2][:DIGITS]
            for key in _asked(text)
        ]
        told = decode(text.tokens[text.scored])
        answers = [told[at : at + DIGITS] for at in range(0, len(told), DIGITS)]
        assert answers == hidden
        assert len(set(answers)) == 3
        assert text.scored.sum() == 3 * DIGITS


def _asked(text: ScoredText) -> list[str]:
    """Return the keys in the order of the questions."""
    parts = decode(text.tokens).split("The magic number of ")
    return [part.partition(",")[0] for part in parts if "as the text above says" in part]


def test_the_rest_of_the_text_is_a_piece_of_its_document_in_order():
    for text, document in zip(needles(), DOCUMENTS, strict=True):
        hay = text.tokens[text.tokens >= 1000]
        assert document[0] <= hay[0] < hay[-1] <= document[-1]
        assert (np.diff(hay) == 1).all()
        assert not text.scored[text.tokens >= 1000].any()


def test_needles_lie_at_their_depths_and_the_default_is_the_very_start():
    for text in needles(needles=2):
        opening = decode(text.tokens[: len(INSTRUCTION)])
        assert opening == INSTRUCTION
        first = len(INSTRUCTION) + 2 * len(NEEDLE.format(key="amber", number="0" * DIGITS)) + 4
        assert (text.tokens[:first] >= 1000).sum() < 8
    for text in needles(needles=3, depths=(1.0, 0.25)):
        before, *between, after = _hay_between(text)
        whole = before + sum(between) + after
        assert before == pytest.approx(0.25 * whole, abs=1)
        assert between == [whole - before, 0]
        assert after == 0


def _hay_between(text: ScoredText) -> list[int]:
    """Return how many tokens of the document lie before, between and after the needles."""
    whole = text.tokens
    starts = [
        place
        for place in range(len(whole))
        if decode(whole[place : place + 16]) == "The magic number"
        and " is " in decode(whole[place : place + 40])
    ]
    hay = np.flatnonzero(whole >= 1000)
    edges = [0, *starts, LENGTH]
    return [int(((hay >= a) & (hay < b)).sum()) for a, b in pairwise(edges)]


def test_a_seed_gives_the_same_texts_and_another_seed_other_numbers_and_windows():
    first, same, other = needles(), needles(), needles(seed=1)
    for one, two, three in zip(first, same, other, strict=True):
        assert (one.tokens == two.tokens).all()
        assert decode(one.tokens[one.scored]) != decode(three.tokens[three.scored])
        assert one.tokens[one.tokens >= 1000][0] != three.tokens[three.tokens >= 1000][0]


def test_a_guess_of_the_digits_costs_their_entropy_shared_by_the_tokens_of_an_answer():
    for count in (1, 3):
        found = guess_nats(needles(needles=count), count)
        assert found == pytest.approx(np.log(10))  # a token for each digit


def test_the_end_of_a_document_is_scored_from_the_position_asked_for():
    for text, document in zip(texts_past(DOCUMENTS, length=100, after=60), DOCUMENTS, strict=True):
        assert np.flatnonzero(text.scored).tolist() == list(range(60, 100))
        start = np.flatnonzero(document == text.tokens[0])[0]
        assert (text.tokens == document[start : start + 100]).all()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"needles": 0}, "needles is 0; it must be 1 to 16"),
        ({"needles": 17}, "needles is 17"),
        ({"depths": ()}, r"depths are \[\]"),
        ({"depths": (0.5, 1.5)}, r"depths are \[0.5, 1.5\]"),
        ({"length": 300}, "too short"),
    ],
    ids=str,
)
def test_texts_that_cannot_be_made_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        needles(**wrong)


@pytest.mark.parametrize("after", [0, 100])
def test_an_end_that_is_none_is_refused(after):
    with pytest.raises(ValueError, match="nothing to score"):
        texts_past(DOCUMENTS, length=100, after=after)
