# SPDX-License-Identifier: Apache-2.0
"""Token ids of a hidden fact and of the question about it, so that the answer can be copied.

A tokenizer encodes a number by its neighbours: SentencePiece puts a space token in front of a text
that begins with it, and BPE merges a space or a line break with digits. A number that is encoded
alone has other tokens than the same number in a sentence, and a model that copies perfectly would
fail. Here a number is always encoded together with the text around it:

    fact        \nPASSKEY = 48213\n            in the middle of a text, so no token for its start
    question    ... \nPASSKEY = 48213          tokens after those of "... \nPASSKEY = ": the answer

Fact and question must have the same character and space before the number, and the same character
after it. Every tokenizer that splits text at spaces then gives the number the same tokens in both.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

Encode = Callable[[str], Sequence[int]]

BEFORE = "a"
"""A letter in front of a fact, which no vocabulary merges with a line break."""


def text_encoder(folder: Path) -> Encode:
    """Return what encodes a text by the tokenizer in a store's folder, without special tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def inside(encode: Encode, text: str) -> list[int]:
    """Return the token ids of a text that begins with a line break, within another text."""
    before, whole = list(encode(BEFORE)), list(encode(BEFORE + text))
    return whole[len(before) :] if whole[: len(before)] == before else list(encode(text))


def question_and_answer(
    encode: Encode, question: str, answer: str, *, after: str
) -> tuple[list[int], list[int]]:
    """Return the token ids of a question, and those of its answer, which follow it in one text.

    The answer begins with the first token that the question alone does not have: with the space in
    front of a number if the two are one token. `after` is the character after the answer in the
    fact. It is encoded too, but left out unless it is one token with the end of the answer.
    """
    whole, ended = inside(encode, question + answer), inside(encode, question + answer + after)
    if ended[: len(whole)] != whole:
        whole = ended
    start = common_prefix(inside(encode, question), whole)
    return whole[:start], whole[start:]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two texts have in common at their start."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
