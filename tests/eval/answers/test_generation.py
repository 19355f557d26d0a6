# SPDX-License-Identifier: Apache-2.0
"""Greedy generation is transformers', under context and tensor parallelism, and one forward."""

import random
from typing import NamedTuple

import pytest
import torch
from megatron.core import parallel_state

from custom_modules.cpu.backend import cpu_backend
from custom_modules.rope.config import RopeScaling
from eval.answers.generation import next_tokens, padded_length, recomputing, would_generate
from tests.custom_modules.support import llamas
from tests.ranks import run_ranks

ROPE = RopeScaling.base_change(1000)
PROMPTS, NEW_TOKENS = 24, 5
CASES, CASES_OF_TWO_RANKS, CASE_TOKENS = 200, 40, 2
LAYOUTS = {"one rank": (1, 1), "two context ranks": (1, 2), "two tensor ranks": (2, 1)}
TWO_RANKS = ("two context ranks", "two tensor ranks")


class Answers(NamedTuple):
    """What one rank found, by prompt."""

    generated: list[list[int]]
    first_guessed: list[bool]
    """Whether one forward says that a drawn first token would be generated."""
    ended: list[list[int]]
    """Generated, with the second token as the end."""
    padded: int
    told: list[bool]
    """Whether one forward says that the answer of each case would be generated."""
    greedy: list[bool]
    """Whether generation gives the answer of each case."""


def prompts() -> list[list[int]]:
    """Return prompts of 3 to 26 tokens, so that every remainder is padded."""
    draw = random.Random(3)
    return [draw.choices(range(llamas.VOCAB), k=3 + at) for at in range(PROMPTS)]


def guesses() -> list[int]:
    return random.Random(4).choices(range(llamas.VOCAB), k=PROMPTS)


def cases(generated: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Return short prompts with what is generated, and with one token of it replaced, by turns."""
    draw = random.Random(5)
    made = []
    for prompt, answer in zip(case_prompts(2 * len(generated)), generated, strict=True):
        other = list(answer)
        at = draw.randrange(CASE_TOKENS)
        other[at] = (other[at] + draw.randrange(1, llamas.VOCAB)) % llamas.VOCAB
        made += [(prompt, answer), (prompt, other)]
    return made


def case_prompts(number: int) -> list[list[int]]:
    draw = random.Random(6)
    return [draw.choices(range(llamas.VOCAB), k=1 + at % 7) for at in range(number // 2)]


def answers(tp: int, cp: int, number: int = CASES_OF_TWO_RANKS) -> Answers:
    with cpu_backend(force=True):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, context_parallel_size=cp
        )
        weights = llamas.megatron_weights(llamas.made_up_weights())
        model = llamas.ours(ROPE, weights, torch.float64, sequence_parallel=tp > 1).eval()
        generate = recomputing(model)
        made = [generate(prompt, NEW_TOKENS) for prompt in prompts()]
        pairs = list(zip(prompts(), made, strict=True))
        greedy = [generate(prompt, CASE_TOKENS) for prompt in case_prompts(number)]
        judged = cases(greedy)
        found = Answers(
            made,
            [
                would_generate(model, prompt, [guess])
                for prompt, guess in zip(prompts(), guesses(), strict=True)
            ],
            [
                recomputing(model, ends=answer[1:2])(prompt, NEW_TOKENS)
                for prompt, answer in pairs[:4]
            ],
            padded_length(5),
            [would_generate(model, prompt, answer) for prompt, answer in judged],
            [answer == greedy[at // 2] for at, (_, answer) in enumerate(judged)],
        )
        parallel_state.destroy_model_parallel()
    return found


def answers_of_two_ranks() -> dict[str, Answers]:
    return {name: answers(*LAYOUTS[name]) for name in TWO_RANKS}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Answers]]:
    """Start the two ranks of two layouts once, since a rank takes seconds."""
    (alone,) = run_ranks(answers, 1, 1, 1, CASES)
    both = run_ranks(answers_of_two_ranks, 2)
    shared = {name: [rank[name] for rank in both] for name in TWO_RANKS}
    return {"one rank": [alone], **shared}


@pytest.fixture(scope="module")
def of_transformers() -> list[list[int]]:
    model = llamas.hugging_face(ROPE, llamas.made_up_weights(), torch.float64)
    made = []
    for prompt in prompts():
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            logits = model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits.float().argmax()))
        made.append(ids[len(prompt) :])
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_generates_what_transformers_does(found, of_transformers, layout):
    assert len({tuple(each) for each in of_transformers}) > PROMPTS // 2
    for rank in found[layout]:
        assert rank.generated == of_transformers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_forward_tells_whether_a_drawn_token_would_be_generated(found, layout):
    for rank in found[layout]:
        firsts = [answer[0] for answer in rank.generated]
        assert rank.first_guessed == [
            first == guess for first, guess in zip(firsts, guesses(), strict=True)
        ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_forward_tells_exactly_which_answers_are_generated(found, layout):
    for rank in found[layout]:
        assert len(rank.greedy) == (CASES if layout == "one rank" else CASES_OF_TWO_RANKS)
        assert sum(rank.greedy) == len(rank.greedy) // 2
        assert rank.told == rank.greedy


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generation_ends_before_the_end_token(found, layout):
    for rank in found[layout]:
        for whole, ended in zip(rank.generated, rank.ended, strict=False):
            assert ended == whole[: whole.index(whole[1])]


def test_a_sequence_is_padded_to_what_ranks_divide(found):
    padded = {layout: ranks[0].padded for layout, ranks in found.items()}
    assert padded == {"one rank": 5, "two context ranks": 8, "two tensor ranks": 6}


def test_a_prompt_without_a_token_is_refused(megatron_rank):
    with pytest.raises(ValueError, match="prompt that is not empty"):
        next_tokens(None, [], -1, 0)


def test_logits_that_are_not_finite_give_no_score(megatron_rank):
    weights = llamas.megatron_weights(llamas.made_up_weights())
    model = llamas.ours(ROPE, weights, torch.float64).eval()
    torch.nn.init.constant_(model.output_layer.weight, torch.nan)
    with pytest.raises(ValueError, match="logits are not finite, so nothing can be scored"):
        next_tokens(model, [1, 2, 3], 0, 2)
