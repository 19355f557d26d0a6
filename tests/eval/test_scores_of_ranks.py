# SPDX-License-Identifier: Apache-2.0
"""Ranks that share texts, positions or the vocabulary score as transformers' model does."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from custom_modules.cpu.backend import cpu_backend
from custom_modules.gpt.model import LongContextGPT
from custom_modules.rope.config import RopeScaling
from eval.answers.passkey import Prompt, score
from eval.loss.context_gain import context_gain
from eval.loss.loss_by_length import loss_by_length
from eval.loss.loss_by_position import windows
from eval.loss.short_loss import short_loss
from eval.measurements import ContextGain, ShortLoss
from eval.rope_search.scored_loss import mean_loss
from eval.rope_search.scored_text import ScoredText
from tests.custom_modules.support import llamas
from tests.ranks import run_ranks

PLAIN = RopeScaling.base_change(10_000)
YARN = RopeScaling.yarn(base=10_000, factor=4.0, original_length=8)
LENGTH, ANSWER = 32, 5
WINDOW, SCORED, CONTEXTS = 128, 32, (64, 128)
SOURCES = ("books", "code", "books")


def told_by_transformers(rope: RopeScaling, tokens: Tensor) -> Tensor:
    """Return the log-probabilities [s, V] of the model of transformers."""
    model = llamas.hugging_face(rope, llamas.made_up_weights(), torch.float64)
    with torch.no_grad():
        logits: Tensor = model(tokens[None]).logits[0]
    return logits.log_softmax(-1)


def scored_texts() -> list[ScoredText]:
    """Return three texts of 32 tokens with few and uneven scored ones, the last one among them."""
    draws = np.random.default_rng(4)
    texts = []
    for count in (1, 5, 9):
        scored = np.zeros(LENGTH, dtype=bool)
        scored[draws.choice(np.arange(1, LENGTH), count, replace=False)] = True
        scored[-1] = True
        texts.append(ScoredText(draws.integers(0, llamas.VOCAB, LENGTH), scored))
    return texts


def passkey_prompts() -> list[Prompt]:
    """Return a prompt whose answer the model gives, and one with another last token."""
    tokens = torch.from_numpy(scored_texts()[0].tokens)
    for at in range(LENGTH - ANSWER, LENGTH):
        tokens[at] = told_by_transformers(PLAIN, tokens)[at - 1].argmax()
    other = tokens.clone()
    other[-1] = (other[-1] + 1) % llamas.VOCAB
    return [Prompt(each.numpy(), ANSWER) for each in (tokens, other)]


def documents() -> list[np.ndarray]:
    """Return three documents that are longer than a window."""
    draws = np.random.default_rng(9)
    return [draws.integers(0, llamas.VOCAB, WINDOW + more) for more in (1, 5, 40)]


def brief_documents() -> list[np.ndarray]:
    """Return documents of uneven lengths, most of which ranks have to pad."""
    draws = np.random.default_rng(11)
    return [draws.integers(0, llamas.VOCAB, tokens) for tokens in (18, 33, 64)]


class Scores(NamedTuple):
    """What a rank computed in a layout."""

    losses: tuple[float, float, float]
    """Under YaRN, under plain RoPE, and again under YaRN, of one model."""
    passkeys: list[tuple[float, float, float]]
    head_rows: list[int]
    """How many positions the output layer saw at each prompt on this rank."""
    gain: ContextGain
    short: ShortLoss | None
    by_length: dict[int, float]
    """Of the first brief document, which is fewer than the data ranks, and of all."""


def score_on_this_rank(prompts: list[Prompt], **sizes: int) -> Scores:
    with cpu_backend(force=True):
        parallel_state.initialize_model_parallel(**sizes)
        weights = llamas.megatron_weights(llamas.made_up_weights())
        model = llamas.ours(PLAIN, weights, torch.float64)
        own = model.rotation
        losses = tuple(mean_loss(model, scored_texts(), rope) for rope in (YARN, PLAIN, YARN))
        assert model.rotation is own
        assert model.loss_tile is None
        passkeys, head_rows = passkeys_of(model, prompts)
        gain = context_gain(model, documents(), WINDOW, SOURCES)
        short = short_loss(model, brief_documents(), WINDOW)
        assert short_loss(model, [], WINDOW) is None
        brief = brief_documents()
        by_length = loss_by_length(model, {16: brief[:1], 32: brief})
        parallel_state.destroy_model_parallel()
    return Scores(losses, passkeys, head_rows, gain, short, by_length)


def passkeys_of(
    model: LongContextGPT, prompts: list[Prompt]
) -> tuple[list[tuple[float, float, float]], list[int]]:
    scattered, rows = model.output_layer.sequence_parallel, []
    count = model.output_layer.register_forward_hook(
        lambda _, inputs, output: rows.append(len(inputs[0]))
    )
    found = [score(model, prompt) for prompt in prompts]
    count.remove()
    assert model.output_layer.sequence_parallel is scattered
    return found, rows


def score_in_every_layout(prompts: list[Prompt]) -> dict[str, Scores]:
    """Score in each layout of two ranks; in one set of them, since a rank takes seconds."""
    return {
        "DP=2": score_on_this_rank(prompts),
        "CP=2": score_on_this_rank(prompts, context_parallel_size=2),
        "TP=2": score_on_this_rank(prompts, tensor_model_parallel_size=2),
    }


@pytest.fixture(scope="module")
def layouts() -> list[dict[str, Scores]]:
    return run_ranks(score_in_every_layout, 2, passkey_prompts())


def expected_loss(rope: RopeScaling) -> float:
    losses = []
    for text in scored_texts():
        tokens = torch.from_numpy(text.tokens)
        told = told_by_transformers(rope, tokens)
        losses += [-told[place - 1, tokens[place]] for place in np.flatnonzero(text.scored)]
    return float(sum(losses) / len(losses))


@pytest.mark.parametrize("layout", ["DP=2", "CP=2", "TP=2"])
def test_scored_tokens_have_the_loss_that_transformers_computes(layouts, layout):
    yarn, plain = expected_loss(YARN), expected_loss(PLAIN)
    assert abs(yarn - plain) > 0.01
    for of_rank in layouts:
        assert of_rank[layout].losses == pytest.approx((yarn, plain, yarn), rel=1e-5)  # fp32 tables
    assert layouts[0][layout].losses == layouts[1][layout].losses


@pytest.mark.parametrize("layout", ["DP=2", "CP=2", "TP=2"])
def test_answers_to_passkeys_are_judged_as_by_the_logits_of_transformers(layouts, layout):
    for at, (prompt, right) in enumerate(zip(passkey_prompts(), (1.0, 0.0), strict=True)):
        tokens = torch.from_numpy(prompt.tokens)
        told = told_by_transformers(PLAIN, tokens)
        answer = torch.arange(LENGTH - ANSWER, LENGTH)
        nats = float(-told[answer - 1, tokens[answer]].sum())
        for of_rank in layouts:
            assert of_rank[layout].passkeys[at] == pytest.approx((right, nats, ANSWER), rel=1e-5)


@pytest.mark.parametrize(("layout", "rows"), [("DP=2", [5, 5]), ("CP=2", [5, 0]), ("TP=2", [5, 5])])
def test_only_the_rows_of_the_answer_pass_through_the_output_layer(layouts, layout, rows):
    # of two context ranks, the first has the last quarter of the positions
    assert [of_rank[layout].head_rows for of_rank in layouts] == [[count] * 2 for count in rows]


@pytest.mark.parametrize("layout", ["DP=2", "CP=2", "TP=2"])
def test_the_last_tokens_have_the_loss_of_transformers_given_each_context(layouts, layout):
    expected = []
    for window in windows(documents(), WINDOW):
        row = []
        for context in CONTEXTS:
            tokens = torch.from_numpy(window[-context:])
            told = told_by_transformers(PLAIN, tokens)
            last = torch.arange(context - SCORED, context)
            row.append(-float(told[last - 1, tokens[last]].mean()))
        expected.append(row)
    for of_rank in layouts:
        gain = of_rank[layout].gain
        assert (gain.scored, gain.contexts) == (SCORED, CONTEXTS)
        assert np.array(gain.by_document) == pytest.approx(np.array(expected), rel=1e-5)
        assert gain.loss == pytest.approx(np.mean(expected, 0), rel=1e-5)
        error = np.std(expected, 0, ddof=1) / 3**0.5
        assert gain.standard_error == pytest.approx(error, rel=1e-4)
        books, code, copied = gain.parts
        assert (books.name, books.tokens, books.documents) == ("books", 2 * SCORED, 2)
        assert books.loss == pytest.approx(np.mean(expected[::2], 0), rel=1e-5)
        error = np.std(expected[::2], 0, ddof=1) / 2**0.5
        assert books.standard_error == pytest.approx(error, rel=1e-4)
        assert (code.tokens, code.documents, code.loss) == (SCORED, 1, ())
        assert copied.name == "copied"


@pytest.mark.parametrize("layout", ["DP=2", "CP=2", "TP=2"])
def test_whole_short_documents_have_the_loss_of_transformers_without_their_padding(layouts, layout):
    means, tokens = [], []
    for document in map(torch.from_numpy, brief_documents()):
        told = told_by_transformers(PLAIN, document)
        places = torch.arange(1, len(document))
        means.append(-float(told[places - 1, document[places]].mean()))
        tokens.append(len(places))
    for of_rank in layouts:
        short = of_rank[layout].short
        assert (short.length, short.tokens) == (WINDOW, tuple(tokens))
        assert short.by_document == pytest.approx(means, rel=1e-5)
        assert short.loss == pytest.approx(np.mean(means), rel=1e-5)
        assert short.token_loss == pytest.approx(np.average(means, weights=tokens), rel=1e-5)
        by_length = {16: means[0], 32: np.average(means, weights=tokens)}
        assert of_rank[layout].by_length == pytest.approx(by_length, rel=1e-5)
