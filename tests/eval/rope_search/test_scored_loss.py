# SPDX-License-Identifier: Apache-2.0
"""Needles are where they should be, and their loss is that of transformers' model."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from custom_modules.cpu.backend import cpu_backend
from custom_modules.rope.config import RopeScaling
from eval.rope_search.scored_loss import mean_loss
from eval.rope_search.scored_text import (
    DIGITS,
    INSTRUCTION,
    NEEDLE,
    ScoredText,
    guess_nats,
    needle_texts,
    texts_past,
)
from tests.custom_modules.support import llamas
from tests.ranks import run_ranks

PLAIN = RopeScaling.base_change(10_000)
YARN = RopeScaling.yarn(base=10_000, factor=4.0, original_length=8)
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


def scored_texts() -> list[ScoredText]:
    """Return three texts of 32 tokens with few and uneven scored ones, the last one among them."""
    draws = np.random.default_rng(4)
    texts = []
    for count in (1, 5, 9):
        scored = np.zeros(32, dtype=bool)
        scored[draws.choice(np.arange(1, 32), count, replace=False)] = True
        scored[-1] = True
        texts.append(ScoredText(draws.integers(0, llamas.VOCAB, 32), scored))
    return texts


def expected(rope: RopeScaling) -> float:
    """Return the mean loss by the logits of transformers' model."""
    model = llamas.hugging_face(rope, llamas.made_up_weights(), torch.float64)
    losses = []
    for text in scored_texts():
        tokens = torch.from_numpy(text.tokens)
        with torch.no_grad():
            told = model(tokens[None]).logits[0].log_softmax(-1)
        losses += [-told[place - 1, tokens[place]] for place in np.flatnonzero(text.scored)]
    return float(sum(losses) / len(losses))


def score_on_this_rank(**sizes: int) -> tuple[float, float, float]:
    """Return the score under YaRN, under plain RoPE, and again under YaRN, of one model."""
    with cpu_backend(force=True):
        parallel_state.initialize_model_parallel(**sizes)
        weights = llamas.megatron_weights(llamas.made_up_weights())
        model = llamas.ours(PLAIN, weights, torch.float64)
        own = model.rotation
        scores = tuple(mean_loss(model, scored_texts(), rope) for rope in (YARN, PLAIN, YARN))
        assert model.rotation is own
        assert model.loss_tile is None
        parallel_state.destroy_model_parallel()
    return scores


def score_in_every_layout() -> dict[str, tuple[float, float, float]]:
    """Score in each layout of two ranks; in one set of them, since a rank takes seconds."""
    return {
        "DP=2": score_on_this_rank(),
        "CP=2": score_on_this_rank(context_parallel_size=2),
        "TP=2": score_on_this_rank(tensor_model_parallel_size=2),
    }


@pytest.fixture(scope="module")
def layouts() -> list[dict[str, tuple[float, float, float]]]:
    return run_ranks(score_in_every_layout, 2)


@pytest.mark.parametrize("layout", ["DP=2", "CP=2", "TP=2"])
def test_ranks_that_share_texts_score_as_transformers_does(layouts, layout):
    yarn, plain = expected(YARN), expected(PLAIN)
    assert abs(yarn - plain) > 0.01
    for of_rank in layouts:
        assert of_rank[layout] == pytest.approx((yarn, plain, yarn), rel=1e-5)  # fp32 tables
    assert layouts[0][layout] == layouts[1][layout]
