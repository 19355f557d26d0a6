# SPDX-License-Identifier: Apache-2.0
"""Give samples their length: a binary search on units of haystack, with few encodings.

    most n  with  tokens(prompt of n units) <= budget,     budget = length - tokens to generate

A prompt of 128K tokens takes a second to encode, so the search asks an estimate first: the tokens
of each unit, encoded once, times a ratio that every exact count corrects. The chosen prompt is
always counted exactly, as a whole. The search of a sample ends when its prompt has at least `SHARE`
of the budget, or when one unit more does not fit. Samples of a batch are encoded together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

SHARE = 0.98
"""Part of the budget that a prompt has at least, unless one unit more does not fit."""
AIM = 0.996
"""Part of the budget that the first estimate aims at."""
GUESSES = 6
"""Estimates before the search only halves or doubles."""


class RulerError(ValueError):
    """A suite that cannot be made or scored; the message says why."""


class ShortLengthError(RulerError):
    """A sample whose shortest prompt exceeds the budget."""

    def __init__(self, tokens: int, budget: int) -> None:
        """Say by how much."""
        super().__init__(f"the shortest prompt has {tokens:,} tokens and the budget is {budget:,}")
        self.tokens = tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text of a sample; the model reads both parts, one after the other."""

    input: str
    prefix: str

    @property
    def text(self) -> str:
        """Return what the model reads."""
        return self.input + self.prefix


class Draft(Protocol):
    """A sample whose amount of haystack is still open."""

    @property
    def least(self) -> int:
        """Units without which the sample cannot be made."""

    @property
    def most(self) -> int | None:
        """Units that there are; None if there is no limit."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the metric looks for."""

    @property
    def answer(self) -> str:
        """The whole answer as a continuation of the prompt."""

    def estimate(self, units: int) -> float:
        """Return the estimated tokens of the prompt; grows with the units."""

    def prompt(self, units: int) -> Prompt:
        """Return the prompt with this much haystack."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A prompt with its length."""

    prompt: Prompt
    tokens: int
    units: int


Count = Callable[[Sequence[str]], list[int]]


class Search:
    """The search of one sample: bounds of its units, and the longest prompt that fits."""

    def __init__(self, draft: Draft, budget: int) -> None:
        """Begin between the fewest units and the most."""
        self.draft, self.budget = draft, budget
        self.low = draft.least - 1
        self.high = None if draft.most is None else draft.most + 1
        self.best: Fitted | None = None
        self.tokens_of_least = 0
        self.tried = 0

    @property
    def done(self) -> bool:
        """Return whether the prompt is as long as it has to be, or cannot be longer."""
        if self.best is not None and self.best.tokens >= SHARE * self.budget:
            return True
        return self.high is not None and self.high - self.low <= 1

    def next_units(self, ratio: float) -> int:
        """Return the units to try next; `ratio` is exact tokens by estimated ones."""
        if self.tried < GUESSES:
            units = self._estimated(AIM * self.budget / ratio)
        elif self.high is None:
            units = 2 * max(self.low, 1)
        else:
            units = (self.low + self.high) // 2
        upper = units if self.high is None else self.high - 1
        return max(min(units, upper), self.low + 1)

    def take(self, fitted: Fitted) -> None:
        """Narrow the bounds by an exact count."""
        self.tried += 1
        if fitted.tokens <= self.budget:
            self.low, self.best = fitted.units, fitted
        else:
            self.high = fitted.units
            self.tokens_of_least = fitted.tokens

    def _estimated(self, tokens: float) -> int:
        """Return the most units whose estimate is at most `tokens`."""
        low, step = self.low, 1
        while self._within(low + step, tokens):
            low += step
            step *= 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            if self._within(middle, tokens):
                low = middle
            else:
                high = middle
        return low

    def _within(self, units: int, tokens: float) -> bool:
        if self.high is not None and units >= self.high:
            return False
        return self.draft.estimate(units) <= tokens


def fit(
    drafts: Sequence[Draft], budget: int, count: Count, *, ratio: float = 1.0
) -> tuple[list[Fitted], float]:
    """Return the prompts of samples and the ratio to begin with next time.

    Raises:
        ShortLengthError: if the shortest prompt of a sample has more tokens than the budget.
    """
    searches = [Search(draft, budget) for draft in drafts]
    ratios = [ratio] * len(searches)
    while True:
        open_ = [at for at, search in enumerate(searches) if not search.done]
        if not open_:
            break
        tried = [(at, searches[at].next_units(ratios[at])) for at in open_]
        prompts = [drafts[at].prompt(units) for at, units in tried]
        counted = count([prompt.text for prompt in prompts])
        for (at, units), prompt, tokens in zip(tried, prompts, counted, strict=True):
            ratios[at] = tokens / max(drafts[at].estimate(units), 1.0)
            searches[at].take(Fitted(prompt, tokens, units))
    fitted = []
    for search in searches:
        if search.best is None:
            raise ShortLengthError(search.tokens_of_least, budget)
        fitted.append(search.best)
    return fitted, sum(ratios) / max(len(ratios), 1)
