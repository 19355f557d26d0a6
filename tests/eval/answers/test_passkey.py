# SPDX-License-Identifier: Apache-2.0
"""A model that copies the hidden number finds every passkey, whatever its vocabulary."""

import random
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eval.answers.passkey import DIGITS, NEEDLE, prompts, score
from eval.answers.tokens import inside
from eval.rope_search.scored_text import needle_texts
from tests.eval.vocabularies import KINDS, Vocabulary, without_splits

LENGTHS, DEPTHS, TRIALS = (64, 128), (0.0, 0.25, 0.5, 0.75, 1.0), 3
VOCABULARY = 700
PROSE = "def read(path):\n    return open(path).read()  # the whole file, as text\n\n" * 20

Guess = Callable[[list[int]], int]
"""The next token, given those before."""


@pytest.fixture(scope="module", params=[*KINDS, "BPE that merges across spaces"])
def vocabulary(request) -> Vocabulary:
    return KINDS.get(request.param, without_splits)()


class HeadOfGuesses(nn.Module):
    """Stands for the output layer: hidden states are the logits already."""

    sequence_parallel = False

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return hidden, None


class Scripted(nn.Module):
    """A model that is sure of the token that it guesses from those before."""

    post_process = True  # it has an output layer
    vocabulary = VOCABULARY

    def __init__(self, guess: Guess) -> None:
        super().__init__()
        self.guess, self.output_layer = guess, HeadOfGuesses()

    def forward(self, tokens: Tensor, positions: Tensor, mask: None) -> Tensor:
        ids = tokens[0].tolist()
        hidden = torch.zeros(len(ids), 1, VOCABULARY)
        for at in range(len(ids) - 16, len(ids)):
            hidden[at, 0, self.guess(ids[: at + 1])] = 20.0
        return self.output_layer(hidden)[0].transpose(0, 1)


def tokens_of_number(decode: Callable[[list[int]], str], ids: list[int], number: str) -> list[int]:
    """Return the fewest tokens that spell the number, where it first ends in the text."""
    end = next(at for at in range(len(ids) + 1) if number in decode(ids[:at]))
    start = next(at for at in range(end, -1, -1) if decode(ids[at:end]).strip(" .\n") == number)
    return ids[start:end]


def copier(decode: Callable[[list[int]], str]) -> Guess:
    """Return a guess that copies the tokens of the hidden number after the question."""

    def guess(before: list[int]) -> int:
        found = re.search(rf"PASSKEY = (\d{{{DIGITS}}})\n", decode(before))
        if found is None:
            return 0
        number = tokens_of_number(decode, before, found[1])
        for copied in range(len(number) - 1, -1, -1):
            rest = before[: len(before) - copied]
            asked = decode(rest).rstrip().endswith("PASSKEY ==")
            if asked and before[len(rest) :] == number[:copied]:
                return number[copied]
        return 0

    return guess


def share_found(vocabulary: Vocabulary, guess: Guess) -> dict[tuple[int, float], float]:
    text = np.array(vocabulary.encode(PROSE))
    found = {}
    for length in LENGTHS:
        for depth in DEPTHS:
            made = prompts(vocabulary.encode, text, length=length, depth=depth, trials=TRIALS)
            assert [len(prompt.tokens) for prompt in made] == [length] * TRIALS
            hits = [score(Scripted(guess), prompt)[0] for prompt in made]
            found[length, depth] = sum(hits) / TRIALS
    return found


def test_a_model_that_copies_the_tokens_of_the_number_finds_every_passkey(
    vocabulary, megatron_rank
):
    assert set(share_found(vocabulary, copier(vocabulary.decode)).values()) == {1.0}


def test_a_model_that_guesses_finds_none(vocabulary, megatron_rank):
    draws = random.Random(0)
    assert set(share_found(vocabulary, lambda _: draws.randrange(VOCABULARY)).values()) == {0.0}


def test_the_prompt_says_the_number_twice_and_ends_with_it(vocabulary):
    text = np.array(vocabulary.encode(PROSE))
    for prompt in prompts(vocabulary.encode, text, length=96, depth=0.5, trials=20):
        said = vocabulary.decode(prompt.tokens.tolist())
        number = re.search(r"\nPASSKEY = (\d+)\n", said)[1]
        assert said.endswith(f"\nassert PASSKEY == {number}")
        answer = vocabulary.decode(prompt.tokens[-prompt.answer :].tolist())
        assert answer.strip() == number


def test_a_fact_in_the_middle_of_a_text_has_no_token_for_the_start_of_a_text(vocabulary):
    fact = NEEDLE.format(number="48213")
    ids = inside(vocabulary.encode, fact)
    before = vocabulary.encode("the whole file, as text")
    assert vocabulary.decode([*before, *ids]) == f"the whole file, as text{fact}"


def test_the_answers_of_the_rotation_search_have_the_tokens_of_their_needles(vocabulary):
    document = np.array(vocabulary.encode(PROSE * 4))
    for text in needle_texts(vocabulary.encode, [document] * 5, length=900, needles=4):
        ids = text.tokens.tolist()
        starts = np.flatnonzero(text.scored & ~np.roll(text.scored, 1))
        ends = np.flatnonzero(text.scored & ~np.roll(text.scored, -1)) + 1
        assert len(starts) == 4
        for start, end in zip(starts, ends, strict=True):
            answer = ids[start:end]
            number = vocabulary.decode(answer).strip(" .")  # the full stop may be of its last token
            assert re.fullmatch(r"\d{7}", number)
            assert tokens_of_number(vocabulary.decode, ids, number) == answer
