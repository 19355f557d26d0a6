# SPDX-License-Identifier: Apache-2.0
"""Texts of one length with their scored tokens: answers to needles, or the end of a document.

    <instruction> \n\nThe magic number of amber is 4182650.\n\n <held-out document> ...
    \n\nThe magic number of amber, as the text above says, is 4182650
                                                              ^^^^^^^ scored

Needle-driven perplexity (arXiv 2502.20082, 3.2) is that of the answers only: most tokens of a
document are predicted from those just before them, and their loss depends little on the rotation at
long distances. The paper hides one number of 7 digits at the very start of each text. Here a text
hides several, each with a key, so that one forward pass scores several answers; `depths` sets where
they are. A number has the same tokens in needle and answer (`eval.answers.tokens`). `texts_past`
scores the end of plain documents, as the first LongRoPE did (arXiv 2402.13753).
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.token_files.held_out import with_first
from eval.answers.tokens import inside, question_and_answer

DIGITS = 7
INSTRUCTION = "Some magic numbers are hidden in this text. Remember them, they are asked for later."
NEEDLE = "\n\nThe magic number of {key} is {number}.\n\n"
QUESTION = "\n\nThe magic number of {key}, as the text above says, is "
KEYS = (
    "amber", "birch", "cedar", "delta", "ember", "flint", "garnet", "hazel",
    "indigo", "jasper", "kelp", "larch", "maple", "nectar", "onyx", "pearl",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScoredText:
    """Tokens of one text, and which of them are scored."""

    tokens: NDArray[np.int64]
    scored: NDArray[np.bool_]
    """As long as `tokens`; the first token is never scored."""


def needle_texts(
    encode: Callable[[str], Sequence[int]],
    documents: Sequence[NDArray[np.int64]],
    *,
    length: int,
    needles: int = 4,
    depths: Sequence[float] = (0.0,),
    seed: int = 0,
    first: int = 0,
) -> list[ScoredText]:
    """Return a text of `length` tokens per document, with needles at `depths` (0 first, 1 last).

    Depths are used in turn; questions are in the order of the needles. Documents have at least
    `length` tokens, of which `first` are not of the text and begin the prompt too. Raises
    ValueError for more needles than keys, depths outside 0 to 1, and a
    length that needles and questions alone exceed.
    """
    if not 1 <= needles <= len(KEYS):
        raise ValueError(f"needles is {needles}; it must be 1 to {len(KEYS)}")
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"depths are {list(depths)}; each must be a share of the text, 0 to 1")
    draws = random.Random(f"{seed} {length} {needles}")
    return [
        _needle_text(encode, document, length, [depths[i % len(depths)] for i in range(needles)],
                     draws, first)
        for document in documents
    ]  # fmt: skip


def guess_nats(texts: Sequence[ScoredText], needles: int) -> float:
    """Return nats per scored token of a guess that knows only the number of digits."""
    answered = sum(int(text.scored.sum()) for text in texts)
    return len(texts) * needles * DIGITS * math.log(10) / answered


def texts_past(
    documents: Sequence[NDArray[np.int64]],
    *,
    length: int,
    after: int,
    seed: int = 0,
    first: int = 0,
) -> list[ScoredText]:
    """Return a window of `length` tokens per document, scored from position `after` on.

    It begins with the document's `first` tokens.

    Raises ValueError if nothing is left to score.
    """
    if not 1 <= after < length:
        raise ValueError(f"nothing to score from position {after:,} on in {length:,} tokens")
    draws = random.Random(f"{seed} {length}")
    return [
        ScoredText(_window(document, length, draws, first), np.arange(length) >= after)
        for document in documents
    ]


def _needle_text(
    encode: Callable[[str], Sequence[int]],
    document: NDArray[np.int64],
    length: int,
    depths: Sequence[float],
    draws: random.Random,
    first: int,
) -> ScoredText:
    keys = draws.sample(KEYS, len(depths))
    numbers = ["".join(draws.choices("0123456789", k=DIGITS)) for _ in keys]
    asked = list(zip(keys, numbers, strict=True))
    needles = [inside(encode, NEEDLE.format(key=key, number=number)) for key, number in asked]
    questions = [
        question_and_answer(encode, QUESTION.format(key=key), number, after=".")
        for key, number in asked
    ]
    parts: list[tuple[Sequence[int] | NDArray[np.int64], bool]] = []
    opening = [*document[:first].tolist(), *encode(INSTRUCTION)]
    taken = len(opening) + sum(map(len, needles)) + sum(len(q) + len(a) for q, a in questions)
    if taken > length:
        raise ValueError(
            f"a text of {length} tokens is too short: its {len(keys)} needles, their questions "
            f"and answers take {taken}"
        )
    hay = _window(document[first:], length - taken, draws)
    parts, read = [(opening, False)], 0
    for depth, needle in sorted(zip(depths, needles, strict=True), key=lambda pair: pair[0]):
        place = round(depth * len(hay))
        parts += [(hay[read:place], False), (needle, False)]
        read = place
    parts.append((hay[read:], False))
    for question, answer in questions:
        parts += [(question, False), (answer, True)]
    return ScoredText(
        np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens, _ in parts]),
        np.concatenate([np.full(len(tokens), scored) for tokens, scored in parts]),
    )


def _window(
    document: NDArray[np.int64], length: int, draws: random.Random, first: int = 0
) -> NDArray[np.int64]:
    return with_first(document, draws.randrange(len(document) - length + 1), length, first)
