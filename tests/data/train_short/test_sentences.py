# SPDX-License-Identifier: Apache-2.0
"""Where sentences end, and which of them a sample is made of."""

import pytest
import torch

from data.train_short.samples import sample_generator
from data.train_short.sentences import chosen_tokens, ends_sentence, has_digit, sentence_starts

TEXTS = ["a", ".", "7", " b", "?", "<eod>", " .", "x1"]
EOD = 5


def choose(starts: str, anchors: str, length: int, keep_others: float = 0.0, seed: int = 0):
    """Return the chosen indices of a text spelled as `|..|.`: a bar where a sentence starts."""
    as_bools = [torch.tensor([letter != "." for letter in text]) for text in (starts, anchors)]
    generator = torch.Generator().manual_seed(seed)
    chosen = chosen_tokens(*as_bools, generator, length=length, keep_others=keep_others)
    return chosen.tolist()


def test_a_sentence_ends_with_a_mark_of_its_own_token_and_with_its_document():
    assert ends_sentence(TEXTS, EOD).tolist() == [0, 1, 0, 0, 1, 1, 0, 0]
    assert has_digit(TEXTS).tolist() == [0, 0, 1, 0, 0, 0, 0, 1]


def test_the_token_after_an_end_starts_the_next_sentence():
    tokens = torch.tensor([0, 3, 1, 1, 2, 5, 6, 0])
    found = sentence_starts(tokens, ends_sentence(TEXTS, EOD))
    assert found.tolist() == [1, 0, 0, 1, 1, 0, 1, 0]


def test_sentences_with_an_anchor_are_taken_in_order_until_the_sample_is_full():
    assert choose("|..|.|..|.", "..a.....a.", 5) == [0, 1, 2, 8, 9]
    assert choose("|..|.|..|.", "..a.....a.", 4) == [0, 1, 2, 8]
    assert choose("|..|.|..|.", "a..a.a..a.", 6) == [0, 1, 2, 3, 4, 5]


def test_where_anchors_are_too_few_other_sentences_are_added_at_random_but_no_more_than_needed():
    seen = {tuple(choose("|..|.|..|.", "........a.", 5, seed=seed)) for seed in range(60)}
    assert seen == {
        (0, 1, 2, 8, 9),
        (5, 6, 7, 8, 9),
        (0, 1, 2, 3, 4),  # the one of two tokens came first and was not enough
        (3, 4, 5, 6, 7),
    }


def test_every_sentence_is_taken_where_the_text_is_as_long_as_the_sample():
    assert choose("|..|.|..|.", "..........", 10) == list(range(10))


def test_others_stay_by_their_chance():
    kept = sum(3 in choose("|..|.|..|.", "a.......a.", 5, keep_others=0.5, seed=seed)
               for seed in range(400))  # fmt: skip
    assert kept / 400 == pytest.approx(0.5, abs=0.08)


def test_a_text_shorter_than_the_sample_is_refused():
    with pytest.raises(ValueError, match="11 tokens cannot be chosen from a text of 10"):
        choose("|..|.|..|.", "..........", 11)


def test_a_generator_is_of_its_seed_and_its_sample():
    first = {
        (seed, sample): int(torch.randint(2**40, (), generator=sample_generator(seed, sample)))
        for seed in (1, 12)
        for sample in (0, 3, 23)
    }
    assert len(set(first.values())) == 6  # 1/23 is not 12/3
    again = torch.randint(2**40, (), generator=sample_generator(12, 3))
    assert first[12, 3] == int(again) == 347_923_435_160
