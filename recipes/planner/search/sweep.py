# SPDX-License-Identifier: Apache-2.0
"""The planner's choice at each of several lengths and numbers of GPUs, and what a budget costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recipes.planner.goodput import Goodput, goodput
from recipes.planner.plan import Plan
from recipes.planner.search.ranking import search
from recipes.planner.search.request import SearchRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A length on a number of GPUs."""

    question: SearchRequest
    plan: Plan | None
    """The planner's choice; None if no layout fits."""
    tokens: int
    """Budget of the stage."""

    @property
    def goodput(self) -> Goodput:
        """The share of the wall time that trains, of a point that fits."""
        assert self.plan is not None, "nothing fits"
        return goodput(self.plan, max(1, round(self.tokens / self.question.tokens_per_batch)))

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the budget on nodes that fail."""
        assert self.plan is not None, "nothing fits"
        return self.plan.gpu_hours(self.tokens) / self.goodput.share

    @property
    def days(self) -> float:
        """Days that the budget takes on nodes that fail."""
        return self.gpu_hours / self.question.gpus / 24


def sweep(
    asked: Sequence[SearchRequest], tokens: int, *, tightest: bool = False
) -> Iterator[Point]:
    """Yield the point of each question."""
    for question in asked:
        found = search(question, tightest=tightest).plans
        yield Point(question=question, plan=found[0] if found else None, tokens=tokens)


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points for which none of the same length takes fewer GPU-hours and fewer days.

    Of points that take the same of both, the first is returned.
    """
    found: list[Point] = []
    best: dict[int, float] = {}
    fitting = [point for point in points if point.plan is not None]
    for point in sorted(fitting, key=lambda one: (one.gpu_hours, one.days)):
        length = point.question.seq_length
        if length not in best or point.days < best[length]:
            best[length] = point.days
            found.append(point)
    return found
