# SPDX-License-Identifier: Apache-2.0
"""The prose in which needles are hidden: essays, or sentences of our own.

A haystack of `n` words is the first `n` of one text, the same for every sample, as in RULER; when
the text is used up it begins again. Needles go between sentences.
"""

import random
import re
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from data.long_range.filler import made_up_paragraphs
from eval.ruler.tokens import Tokens

END = re.compile(r"[.!?][\"')\]]*$")
MADE_UP_SEED = "prose of ruler-offline"
PARAGRAPHS_AT_ONCE = 64


class Prose:
    """One text without end, as sentences."""

    def __init__(self, text: str | None = None) -> None:
        """Take a text to repeat; without one, sentences are made up."""
        self._coming = _repeated(sentences(text)) if text is not None else _made_up()
        self.sentences: list[str] = []
        self.words = np.zeros(1, dtype=np.int64)
        """Words up to each sentence, its own not included."""
        self._tokens = np.zeros(1)

    def parts(self, words: int) -> list[str]:
        """Return the first words of the text by sentences, the last perhaps not whole."""
        self._grow(words)
        last = int(np.searchsorted(self.words, words, side="right")) - 1
        left = words - int(self.words[last])
        whole = self.sentences[:last]
        return [*whole, " ".join(self.sentences[last].split(" ")[:left])] if left else whole

    def tokens(self, words: int, tokens: Tokens) -> float:
        """Return the estimated tokens of the first words."""
        self._grow(words)
        known = len(self._tokens) - 1
        if known < len(self.sentences):
            new = tokens.of_parts([" " + one for one in self.sentences[known:]])
            self._tokens = np.concatenate((self._tokens, self._tokens[-1] + np.cumsum(new)))
        return float(np.interp(words, self.words, self._tokens))

    def _grow(self, words: int) -> None:
        while self.words[-1] <= words:
            new = list(islice(self._coming, 16 * PARAGRAPHS_AT_ONCE))
            counts = [one.count(" ") + 1 for one in new]
            self.sentences += new
            self.words = np.concatenate((self.words, self.words[-1] + np.cumsum(counts)))


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, with one blank for any white space.

    A sentence ends with a word that ends in a full stop, a question or exclamation mark, and quotes
    or brackets after it. RULER asks the package `nltk`, which knows abbreviations.
    """
    found: list[str] = []
    words: list[str] = []
    for word in text.split():
        words.append(word)
        if END.search(word):
            found.append(" ".join(words))
            words = []
    return [*found, " ".join(words)] if words else found


def with_needles(parts: Sequence[str], needles: Sequence[str], depths: Sequence[int]) -> str:
    """Return the text with each needle at its depth, in percent of the sentences, ascending."""
    pieces: list[str] = []
    start = 0
    for needle, depth in zip(needles, depths, strict=True):
        at = len(parts) * depth // 100
        pieces += [*parts[start:at], needle]
        start = at
    return " ".join([*pieces, *parts[start:]])


def with_lines(lines: Sequence[str], hidden: Sequence[str], places: Sequence[float]) -> str:
    """Return lines with hidden ones between, each at its place from 0 to 1, ascending."""
    pieces: list[str] = []
    start = 0
    for line, place in zip(hidden, places, strict=True):
        at = int(place * (len(lines) + 1))
        pieces += [*lines[start:at], line]
        start = at
    return "\n".join([*pieces, *lines[start:]])


def _repeated(once: Sequence[str]) -> Iterator[str]:
    while True:
        yield from once


def _made_up() -> Iterator[str]:
    for paragraph in made_up_paragraphs(random.Random(MADE_UP_SEED)):
        yield from sentences(paragraph)
