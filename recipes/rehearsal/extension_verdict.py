# SPDX-License-Identifier: Apache-2.0
"""The verdict of a probe: does a base follow an extension of its context?

The last tokens of each held-out window are predicted twice: from the native context (its last
tokens, positions from 0 on) and from the whole window. The same tokens are scored, so what differs
is the context alone:

    cost beyond = loss given the whole window - loss given the native context     (nats per token)

A model that reads beyond its native context has a cost of 0 or less; one that is lost there has a
cost of a nat and more. With `c` the cost after the probe and `u` that with the stage's rotation
before any training, both means over the same documents:

    c <= 0.05                          extends readily
    c > 0.05, and c < u by two errors  more tokens, or another base
    c > 0.05 otherwise                 unlikely with this rotation

The limit is ours. A length that is less than twice the scored tokens beyond the native context
leaves no such pair; then the mean loss beyond the native context less that of its second half is
taken, which also has the difference of the texts.

The loss is an imperfect indicator of what long-context tasks will score (arXiv 2409.12181), and
retrieval took others 500M to 5B tokens (2402.10171), which a probe cannot show.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

LIMIT = 0.05
"""Nats: a cost beyond the native context up to it is taken for none."""
ERRORS = 2.0
"""Standard errors that a difference has to exceed to count."""
ALONE = 0.01
"""Nats that a difference has to exceed where a single document leaves no error."""

Word = Literal["extends readily", "more tokens, or another base", "unlikely with this rotation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over documents and its standard error; NaN for a single document."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Return that of one value for each document."""
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(mean=fmean(values), error=error)

    def exceeds(self, limit: float) -> bool:
        """Return whether the mean is above a limit by more than its error can explain."""
        margin = ALONE if math.isnan(self.error) else ERRORS * self.error
        return self.mean - limit > margin

    def __str__(self) -> str:
        """Return the mean, and its error if there is one."""
        return f"{self.mean:+.3f}" + ("" if math.isnan(self.error) else f" +- {self.error:.3f}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Losses of one model on the same windows, a value for each document."""

    contexts: tuple[int, ...]
    """Tokens that the last tokens were predicted from; the last is the whole window."""
    by_context: tuple[tuple[float, ...], ...]
    """Rows of documents, with a loss for each of `contexts`."""
    ranges: tuple[tuple[int, int, tuple[float, ...]], ...]
    """Ranges of positions: start, stop, mean loss of each document."""

    def cost_beyond(self, native: int) -> list[float]:
        """Return the cost of reading beyond the native context, for each document."""
        within = [at for at, context in enumerate(self.contexts) if context <= native]
        if within and self.contexts[-1] > native:
            return [row[-1] - row[within[-1]] for row in self.by_context]
        beyond, before = self._mean(native, math.inf), self._mean(native // 2, native)
        return [late - early for late, early in zip(beyond, before, strict=True)]

    def same_tokens(self, native: int) -> bool:
        """Return whether `cost_beyond` compares the same tokens."""
        return any(context <= native for context in self.contexts)

    def gain(self) -> list[float]:
        """Return the loss given the fewest tokens less that given the whole window."""
        return [row[0] - row[-1] for row in self.by_context]

    def within(self, native: int) -> list[float]:
        """Return the mean loss at positions of the native context, for each document."""
        return self._mean(0, native)

    def _mean(self, start: float, stop: float) -> list[float]:
        """Return the mean loss over the ranges that lie between two positions."""
        inside = [row for row in self.ranges if start <= row[0] and row[1] <= stop]
        size = sum(row[1] - row[0] for row in inside)
        documents = zip(*(row[2] for row in inside), strict=True)
        widths = [row[1] - row[0] for row in inside]
        return [
            sum(loss * width for loss, width in zip(losses, widths, strict=True)) / size
            for losses in documents
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeVerdict:
    """The verdict, with the numbers that it follows from, in nats per token."""

    word: Word
    why: str
    certain: bool
    """Whether the cost after the probe is clear of the limit by two standard errors."""
    cost: Estimate
    """After the probe."""
    cost_untrained: Estimate
    """With the stage's rotation, before training."""
    cost_published: Estimate
    """With the source's own rotation."""
    fell: Estimate
    """Cost that the probe's training removed."""
    within: Estimate
    """Change of the loss within the native context, from the source to after the probe."""
    same_tokens: bool


def verdict(published: Reading, untrained: Reading, trained: Reading, native: int) -> ProbeVerdict:
    """Return the verdict on three readings of the same windows; `native` is in tokens."""
    costs = [reading.cost_beyond(native) for reading in (published, untrained, trained)]
    cost = Estimate.of(costs[2])
    fell = Estimate.of([before - after for before, after in zip(costs[1], costs[2], strict=True)])
    before, after = published.within(native), trained.within(native)
    within = Estimate.of([new - old for old, new in zip(before, after, strict=True)])
    reading = f"reading beyond {native:,} tokens costs {cost} nats after the probe"
    if cost.mean <= LIMIT:
        word: Word = "extends readily"
        why = f"{reading}, at most {LIMIT}"
    elif fell.exceeds(0.0):
        word = "more tokens, or another base"
        why = f"{reading}, above {LIMIT}, and the probe's training took {fell} off"
    else:
        word = "unlikely with this rotation"
        why = f"{reading}, above {LIMIT}, and the probe's training changed it by {_negated(fell)}"
    if within.exceeds(LIMIT):
        why += f"; within {native:,} tokens the loss rose by {within}"
    gain = Estimate.of(trained.gain())
    if not gain.exceeds(0.0):
        why += f"; that it uses the context is not shown: its gain from context is {gain}"
    margin = 0.0 if math.isnan(cost.error) else ERRORS * cost.error
    certain = not math.isnan(cost.error) and abs(cost.mean - LIMIT) > margin
    return ProbeVerdict(
        word=word,
        why=why,
        certain=certain,
        cost=cost,
        cost_untrained=Estimate.of(costs[1]),
        cost_published=Estimate.of(costs[0]),
        fell=fell,
        within=within,
        same_tokens=trained.same_tokens(native),
    )


def _negated(estimate: Estimate) -> Estimate:
    return Estimate(mean=-estimate.mean, error=estimate.error)
