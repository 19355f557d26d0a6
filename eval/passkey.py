# SPDX-License-Identifier: Apache-2.0
r"""Passkey retrieval: a number planted in long text, asked for at its end.

    <text> \nPASSKEY = 48213\n <text> \nassert PASSKEY == 48213
           ^ at `depth` of the length                     ^^^^^ the answer that is scored

The answer is scored by one forward pass over prompt and answer: greedy decoding would produce it
exactly if and only if each of its tokens is the argmax given the ones before, so `hit` needs no
generation. `nats` is the mean loss of an answer token, the finer measure for a small model.
The text is held-out documents; the digits are drawn from a seed, the same for every checkpoint.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DIGITS = 5
NEEDLE = "\nPASSKEY = {number}\n"
QUESTION = "\nassert PASSKEY == "


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
    seed: int = 0,
) -> list[Prompt]:
    """Return prompts of exactly `length` tokens with the needle at `depth` (0 first, 1 last).

    `text` is a document of at least `length` tokens. Raises ValueError where the needle and the
    question alone are longer than `length`.
    """
    numbers = random.Random(f"{seed} {length} {depth}")
    made = []
    for _ in range(trials):
        number = "".join(numbers.choices("0123456789", k=DIGITS))
        needle = list(encode(NEEDLE.format(number=number)))
        question, answer = list(encode(QUESTION)), list(encode(number))
        room = length - len(needle) - len(question) - len(answer)
        if room < 0:
            raise ValueError(
                f"a passkey prompt of {length} tokens is too short: needle, question and answer "
                f"take {length - room}"
            )
        start = numbers.randrange(len(text) - room + 1)
        before = round(depth * room)
        hay = text[start : start + room]
        tokens = np.concatenate((hay[:before], needle, hay[before:], question, answer))
        made.append(Prompt(tokens=tokens.astype(np.int64), answer=len(answer)))
    return made
