# SPDX-License-Identifier: Apache-2.0
"""Counting words: common words of a numbered list, and frequent words of a coded text.

    1. lamp 2. river 3. lamp ...  the 10 most common words -> 1. lamp 2. ...
    ... qzkrfa ... bntlwo qzkrfa  the three most frequent  -> qzkrfa bntlwo ...

Parameters: NVIDIA/RULER, `scripts/synthetic.yaml`, `common_words_extraction.py` (30 times against
3; below 4,096 tokens 6 against 1) and `freq_words_extraction.py` (a Zeta distribution with exponent
2, whose most frequent word is `...`). Units are distinct words of the list, and drawn words of the
coded text.
"""

import math
import random
from collections.abc import Sequence
from string import ascii_lowercase

import numpy as np

from eval.ruler.forms import COMMON_WORDS, FREQUENT_WORDS
from eval.ruler.length import Prompt
from eval.ruler.sources import Setting

COMMON = 10
SHORT = 4096
"""Lengths below this have fewer repetitions, and a smaller example."""
NUMBER = " 1000."
"""A number of the list, for the estimate."""
ROOM = 1.3
"""Words drawn, in the number that is expected."""
CODED_LETTERS = 6
ALPHA = 2.0
ZETA = math.pi**2 / 6
"""Zeta(2)."""
TOKENS_OF_CODED_WORD = 50
"""Tokens of the budget for each word of the coded vocabulary."""
NO_WORD = "..."
ASKED = 3


class CommonWordsDraft:
    """A sample of a numbered list, after a solved example."""

    least = COMMON + 1

    def __init__(self, setting: Setting, draw: random.Random) -> None:
        """Draw the words, common ones first, and the example."""
        short = setting.length < SHORT
        self._repeats = (6, 1) if short else (30, 3)
        example, repeats = (20, (3, 1)) if short else (40, (10, 3))
        tokens, sources = setting.tokens, setting.sources
        self._of_number = tokens.of_part(NUMBER)
        entry = self._of_number + sum(tokens.of_parts(_blank(sources.words[:256]))) / 256
        expected = COMMON + ROOM * setting.budget / (entry * self._repeats[1])
        words = sources.words if expected <= len(sources.words) else sources.many_words
        self._words = draw.sample(words, min(math.ceil(expected), len(words)))
        self.most = len(self._words)
        self._order = draw.getrandbits(64)
        self.outputs = tuple(self._words[:COMMON])
        self.answer = _solved(self.outputs)
        of_example = draw.sample(sources.words, example)
        question = self._filled(_numbered(of_example, repeats, draw.getrandbits(64)))
        self._example = f"{question.text}{_solved(of_example[:COMMON])}\n"
        weights = np.full(self.most, float(self._repeats[1]))
        weights[:COMMON] = self._repeats[0]
        of_words = np.array(tokens.of_parts(_blank(self._words))) + self._of_number
        self._tokens = np.concatenate(([0.0], np.cumsum(weights * of_words)))
        self._tokens += tokens.of_part(self._example + self._filled("").text)

    def estimate(self, units: int) -> float:
        """Return the estimated tokens with this many distinct words."""
        return float(self._tokens[min(units, self.most)])

    def prompt(self, units: int) -> Prompt:
        """Return the prompt with this many distinct words."""
        asked = self._filled(_numbered(self._words[:units], self._repeats, self._order))
        return Prompt(self._example + asked.input, asked.prefix)

    @staticmethod
    def _filled(context: str) -> Prompt:
        return Prompt(COMMON_WORDS.template.format(context=context), COMMON_WORDS.prefix)


class FrequentWordsDraft:
    """A sample of a coded text."""

    most = None

    def __init__(self, setting: Setting, draw: random.Random) -> None:
        """Draw the vocabulary, most frequent first."""
        size = max(setting.budget // TOKENS_OF_CODED_WORD, ASKED + 2)
        words: dict[str, None] = {NO_WORD: None}
        while len(words) < size:
            words["".join(draw.choices(ascii_lowercase, k=CODED_LETTERS))] = None
        self._words = list(words)
        self._order = draw.getrandbits(64)
        self._shares = np.arange(1, size + 1) ** -ALPHA / ZETA
        self._of_words = np.array(setting.tokens.of_parts(_blank(self._words)))
        self._bare = setting.tokens.of_part(self._filled("").text)
        self.outputs = tuple(self._words[1 : ASKED + 1])
        self.answer = " " + " ".join(self.outputs)
        apart = math.ceil(1 / (self._shares[ASKED] - self._shares[ASKED + 1]))
        ties = (units for units in range(apart, 0, -1) if not self._distinguishes(units))
        self.least = next(ties, 0) + 1

    def estimate(self, units: int) -> float:
        """Return the estimated tokens of a text of this many drawn words."""
        return float(self._bare + self._times(units) @ self._of_words)

    def prompt(self, units: int) -> Prompt:
        """Return the prompt with a text of this many drawn words."""
        times = self._times(units).tolist()
        text = [word for word, count in zip(self._words, times, strict=True) for _ in range(count)]
        random.Random(self._order).shuffle(text)
        return self._filled(" ".join(text))

    def _times(self, units: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return np.floor(units * self._shares).astype(np.int64)

    def _distinguishes(self, units: int) -> bool:
        """Return whether the words asked for are more frequent than any other."""
        times = self._times(units)
        return int(times[ASKED]) > int(times[ASKED + 1])

    @staticmethod
    def _filled(context: str) -> Prompt:
        return Prompt(FREQUENT_WORDS.template.format(context=context), FREQUENT_WORDS.prefix)


def _numbered(words: Sequence[str], repeats: tuple[int, int], order: int) -> str:
    entries = [*words[:COMMON]] * repeats[0] + [*words[COMMON:]] * repeats[1]
    random.Random(order).shuffle(entries)
    return " ".join(f"{number}. {word}" for number, word in enumerate(entries, 1))


def _solved(words: Sequence[str]) -> str:
    return "".join(f" {number}. {word}" for number, word in enumerate(words, 1))


def _blank(words: Sequence[str]) -> list[str]:
    return [" " + word for word in words]
