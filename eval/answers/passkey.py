# SPDX-License-Identifier: Apache-2.0
r"""Passkey retrieval: a number planted in long text, asked for at its end.

    <text> \nPASSKEY = 48213\n <text> \nassert PASSKEY == 48213
           ^ at `depth` of the length                     ^^^^^ the answer that is scored

The number has the same tokens in both places (`eval.answers.tokens`), so that copying them answers.
The documents of `data.long_range` in the form `code` ask in the same words.

The answer is scored by one forward pass over prompt and answer: greedy decoding would produce it
exactly if and only if each of its tokens is the argmax given the ones before, so `hit` needs no
generation. `nats` is the mean loss per answer token, a finer measure for small models. The text is
held-out documents; the digits are drawn from a seed, the same for every checkpoint.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from custom_modules.gpt.model import LongContextGPT
from eval.answers.generation import next_tokens
from eval.answers.tokens import inside, question_and_answer

DIGITS = 5
NEEDLE = "\nPASSKEY = {number}\n"
QUESTION = "\nassert PASSKEY == "
PASSKEY_SEED = 0
PROMPT_VERSION = 2
"""Results of other versions cannot be compared. 1: question and answer were encoded apart."""


@dataclass(frozen=True)
class Prompt:
    """Hold one prompt as token ids, its answer at the end."""

    tokens: NDArray[np.int64]
    answer: int
    """Tokens of the answer, the last ones of `tokens`."""


def prompts(
    encode: Callable[[str], Sequence[int]],
    text: NDArray[np.int64],
    *,
    length: int,
    depth: float,
    trials: int,
    seed: int = PASSKEY_SEED,
    first: int = 0,
) -> list[Prompt]:
    """Return prompts of exactly `length` tokens with the needle at `depth` (0 first, 1 last).

    `text` is a document of at least `length` tokens, of which the `first` are not of the text and
    begin the prompt too. Raises ValueError if the needle and the question alone are longer than
    `length`.
    """
    numbers = random.Random(f"{seed} {length} {depth}")
    made = []
    for _ in range(trials):
        number = "".join(numbers.choices("0123456789", k=DIGITS))
        needle = inside(encode, NEEDLE.format(number=number))
        question, answer = question_and_answer(encode, QUESTION, number, after="\n")
        room = length - first - len(needle) - len(question) - len(answer)
        if room < 0:
            raise ValueError(
                f"a passkey prompt of {length} tokens is too short: needle, question and answer "
                f"take {length - room}"
            )
        start = first + numbers.randrange(len(text) - first - room + 1)
        before = round(depth * room)
        hay = text[start : start + room]
        read = (text[:first], hay[:before], needle, hay[before:])
        tokens = np.concatenate((*read, question, answer))
        made.append(Prompt(tokens=tokens.astype(np.int64), answer=len(answer)))
    return made


def score(model: LongContextGPT, prompt: Prompt) -> tuple[float, float, float]:
    """Return hit (0 or 1), summed nats and number of tokens of the answer, on the last stage.

    Earlier pipeline stages do not wait for it, and return nothing of meaning. It is a hit if each
    token is the likeliest one; of equal logits the lowest id wins.
    """
    last = len(prompt.tokens) - 1
    told = next_tokens(model, prompt.tokens, last - prompt.answer, last, on_all_stages=False)
    hit = told.likeliest.tolist() == prompt.tokens[-prompt.answer :].tolist()
    return float(hit), float(told.nats.sum()), float(prompt.answer)
