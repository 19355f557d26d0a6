# SPDX-License-Identifier: Apache-2.0
"""Needles in a haystack: eight tasks that hide keys with values and ask for some of them.

    ...One of the special magic numbers for brisk-lantern is: 4921573....
    What is the special magic number for brisk-lantern mentioned in the provided text?
    -> 4921573

Parameters of each task: NVIDIA/RULER, `scripts/synthetic.yaml`. Units of haystack are repeated
lines (`noise`), words of prose (`essay`) or other needles (`needles`).
"""

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from eval.ruler.forms import NEEDLE, NEEDLES, NOISE, ONE_NEEDLE, Form
from eval.ruler.haystack import with_lines, with_needles
from eval.ruler.length import Prompt
from eval.ruler.sources import Setting

Haystack = Literal["noise", "essay", "needles"]
Kind = Literal["words", "numbers", "uuids"]
DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""Depths of needles in prose, in percent: RULER's forty."""
SMALLEST_NUMBER, LARGEST_NUMBER = 1_000_000, 9_999_999
SAMPLED_LINES = 64
"""Needles of the haystack whose tokens are averaged for the estimate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needles:
    """What is hidden where, and how much of it is asked for."""

    haystack: Haystack
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    """Values of each key."""
    queries: int = 1

    @property
    def form(self) -> Form:
        """Return the published form: one value asked for, or several."""
        return ONE_NEEDLE if self.queries * self.values == 1 else NEEDLES


class NeedleDraft:
    """A sample of one of the tasks."""

    most = None

    def __init__(self, needles: Needles, setting: Setting, draw: random.Random) -> None:
        """Draw keys, values, their order and places."""
        self._needles, self._setting = needles, setting
        new_key = self._words(draw) if needles.key == "words" else _drawn(needles.key, draw)
        new_value = self._words(draw) if needles.value == "words" else _drawn(needles.value, draw)
        values = {
            key: _distinct(new_value, needles.values)
            for key in _distinct(new_key, max(needles.keys, needles.queries))
        }
        lines = [self._line(key, value) for key, of_key in values.items() for value in of_key]
        draw.shuffle(lines)
        self._lines = lines
        self._depths = sorted(draw.sample(DEPTHS, len(lines)))
        self._places = sorted(draw.random() for _ in lines)
        asked = draw.sample(sorted(values), needles.queries)
        self._query = _listed(asked)
        self.outputs = tuple(value for key in asked for value in values[key])
        self.answer = " " + _listed(self.outputs)
        self.least = 0 if needles.haystack == "essay" else len(lines)
        other = random.Random(draw.getrandbits(64))
        other_key = self._words(other) if needles.key == "words" else _drawn(needles.key, other)
        other_value = _drawn(needles.value, other)
        self._others = (
            self._line(key, other_value()) for key in iter(other_key, "") if key not in values
        )
        self._drawn_others: list[str] = []
        self._bare = float(setting.tokens.of_part(self._filled("").text))
        self._bare += sum(setting.tokens.of_parts([line + "\n" for line in lines]))

    def estimate(self, units: int) -> float:
        """Return the estimated tokens with this many units of haystack."""
        tokens = self._setting.tokens
        if self._needles.haystack == "essay":
            return self._bare + self._setting.sources.prose.tokens(units, tokens)
        if self._needles.haystack == "noise":
            return self._bare + units * tokens.of_part(NOISE + "\n")
        sampled = [line + "\n" for line in self._other_lines(SAMPLED_LINES)]
        return self._bare + units * sum(tokens.of_parts(sampled)) / len(sampled)

    def prompt(self, units: int) -> Prompt:
        """Return the prompt with this many units of haystack."""
        if self._needles.haystack == "essay":
            parts = self._setting.sources.prose.parts(units)
            return self._filled(with_needles(parts, self._lines, self._depths))
        noise = self._needles.haystack == "noise"
        lines = [NOISE] * units if noise else self._other_lines(units)
        return self._filled(with_lines(lines, self._lines, self._places))

    def _filled(self, context: str) -> Prompt:
        form, values = self._needles.form, self._needles.value
        words = {"values": values, "value": values[:-1], "query": self._query}
        return Prompt(form.template.format(context=context, **words), form.prefix.format(**words))

    def _line(self, key: str, value: str) -> str:
        return NEEDLE.format(values=self._needles.value, key=key, value=value)

    def _other_lines(self, count: int) -> list[str]:
        while len(self._drawn_others) < count:
            self._drawn_others.append(next(self._others))
        return self._drawn_others[:count]

    def _words(self, draw: random.Random) -> Callable[[], str]:
        sources = self._setting.sources
        return lambda: f"{draw.choice(sources.adjectives)}-{draw.choice(sources.nouns)}"


def _drawn(kind: Kind, draw: random.Random) -> Callable[[], str]:
    if kind == "numbers":
        return lambda: str(draw.randint(SMALLEST_NUMBER, LARGEST_NUMBER))
    return lambda: str(uuid.UUID(int=draw.getrandbits(128), version=4))


def _distinct(new: Callable[[], str], count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[new()] = None
    return list(found)


def _listed(words: "list[str] | tuple[str, ...]") -> str:
    """Return words as RULER lists keys: `a`, or `a, b, and c`."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + ", and " + words[-1]
