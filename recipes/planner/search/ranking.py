# SPDX-License-Identifier: Apache-2.0
"""The layouts that fit, ranked by step time, and whether any layout fits.

Both search the same product of parallel sizes and memory settings. The ranking bounds it: the time
of a shape without recompute and offload is a lower bound for all its settings, so shapes are taken
in the order of that bound until it exceeds the time of the layouts found. A layout with parts that
have not been tried on GPUs (`Plan.untried`) is the first plan only where nothing else fits; else
one that is faster than the first by `UNTRIED_GAIN` follows it.

The first plan is not the fastest that was tried where one within `TOLERANCE` of its time takes less
GPU memory by `LEANER`, and no more host memory: a prediction is less accurate than that time, and a
full GPU leaves nothing for its errors.
"""

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from recipes.constraints.violations import OF_EXPERTS
from recipes.planner.feasibility import violations
from recipes.planner.kernels import kernels_on
from recipes.planner.memory import Memory, memory
from recipes.planner.plan import Plan, short, with_host_cap
from recipes.planner.search.memory_settings import (
    Settings,
    adam_on_host,
    chunks_of_stage,
    with_adam_on_device,
    with_interleaved_pipeline,
    with_sharded_gradients,
    with_sharded_parameters,
    without_recompute,
)
from recipes.planner.search.parallel_sizes import parallel_sizes
from recipes.planner.search.request import SearchRequest
from recipes.planner.time import Time, time
from recipes.spec.layout import Layout

RANKED, RANKED_UNTRIED = 4, 1
"""Layouts to find, of different parallel sizes, and more that have untried parts."""
UNTRIED_GAIN = 0.02
"""Share of the step time by which an untried layout has to be faster than the choice."""
TOLERANCE, LEANER = 0.01, 0.1
"""Share of the step time that is given up for GPU memory, and the share of that to gain."""
SLOWER = "parallel sizes that are slower even without recompute and offload"


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Memory settings of one kind of sharding."""

    settings: Callable[[SearchRequest, Layout], list[Settings]]
    """The settings of a shape, the leanest last."""
    adam_on_host: bool = False
    """Whether as much of Adam as the GPU lacks is on the host, which may be nothing."""


Bounded = tuple[float, Layout, Sequence[Family]]
"""A shape with a bound of its step time from below, and the families to try."""
TRIED = (Family(settings=with_adam_on_device),)
INTERLEAVED = Family(settings=with_interleaved_pipeline)
"""Takes more memory than a pipeline that is not, so it does not decide whether any layout fits."""
UNTRIED = (
    Family(settings=with_adam_on_device, adam_on_host=True),
    Family(settings=with_sharded_parameters),
    Family(settings=with_sharded_gradients),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The result of a search."""

    plans: list[Plan]
    """The planner's choice, a faster plan with untried parts if there is one, then the fastest
    others that fit, of different parallel sizes in the order of their time."""
    ruled_out: Counter[str] = field(default_factory=Counter)
    """Reasons why other layouts are excluded, with their number."""
    nearest: Plan | None = None
    """If none fits, the plan that lacks the least memory."""
    refused: str = ""
    """The constraint that the first plan that fits in memory violates."""
    tried: int = 0
    tightest: bool = False
    """Whether the first is the fastest that was tried, however full the GPUs are."""
    given: bool = False
    """Whether the user named the layout, so that none was searched for."""

    @property
    def automatic(self) -> Plan | None:
        """The plan that a run takes without being told; None if none fits."""
        return next(iter(self.plans), None)


@lru_cache(maxsize=64)
def search(
    question: SearchRequest,
    *,
    tightest: bool = False,
    keep: Callable[[Layout], bool] | None = None,
) -> SearchResult:
    """Return layouts that fit, the choice first; with `tightest` that is the fastest tried one.

    Parallel sizes are only those that `keep` accepts, if it is given.
    """
    ranking = _Ranking(question, tolerance=0.0 if tightest else TOLERANCE)
    ranking.shapes = list(filter(keep, ranking.shapes)) if keep else ranking.shapes
    found = ranking.plans()
    return SearchResult(
        plans=found,
        ruled_out=ranking.ruled_out,
        nearest=None if found else ranking.nearest(),
        refused=ranking.refused,
        tried=ranking.tried,
        tightest=tightest,
    )


def fits(question: SearchRequest) -> bool:
    """Return whether any layout fits."""
    return _Ranking(question).any_fits()


class _Ranking:
    """The search of one question."""

    def __init__(self, question: SearchRequest, *, tolerance: float = TOLERANCE) -> None:
        self.question, self.cluster = question, question.cluster
        self.kernels = kernels_on(question.cluster)
        self.within = 1 + tolerance
        self.ruled_out: Counter[str] = Counter()
        self.refused, self.tried = "", 0
        self.shapes = list(parallel_sizes(question, self.ruled_out))
        if question.card.facts.experts and question.fp8.recipe != "none":
            self.ruled_out[OF_EXPERTS] += len(self.shapes)  # whatever the layout
            self.shapes = []

    def plans(self) -> list[Plan]:
        """Return the choice, a faster plan with untried parts, and the fastest of other shapes."""
        timed = [(self._time(without_recompute(self.question, one)), one) for one in self.shapes]
        tried = self._fastest(
            [(seconds.step, shape, TRIED) for seconds, shape in timed], RANKED, math.inf
        )
        untried: list[Bounded] = [(seconds.step, shape, UNTRIED) for seconds, shape in timed]
        untried += self._interleaved(timed)
        if not tried:
            return self._fastest(untried, RANKED, math.inf)
        limit = tried[0].time.step / (1 + UNTRIED_GAIN)
        return [tried[0], *self._fastest(untried, RANKED_UNTRIED, limit), *tried[1:]]

    def _interleaved(self, timed: Sequence[tuple[Time, Layout]]) -> list[Bounded]:
        """Return the shapes that may interleave their pipeline, with a bound of its step time.

        With n chunks a stage fills and drains in 1 / n of the time, and does not send less.
        """
        found: list[Bounded] = []
        for seconds, shape in timed:
            if chunks := chunks_of_stage(self.question, shape):
                saved = seconds.categories["PP"] * (1 - 1 / chunks[-1])
                found.append((seconds.step - saved, shape, (INTERLEAVED,)))
        return found

    def any_fits(self) -> bool:
        """Return whether any layout fits; shapes with the least weights per rank come first."""
        return any(
            True
            for shape in sorted(self.shapes, key=lambda one: (-one.tp * one.pp, -one.cp.size))
            for family in UNTRIED
            for layout in reversed(self._hopeful(family, shape))
            for _ in self._fitting(family, layout, None)
        )

    def nearest(self) -> Plan | None:
        """Return the plan that lacks the least memory, with full recompute in each shape."""
        lacking: list[tuple[float, Layout]] = []
        for shape in self.shapes:
            full = with_adam_on_device(self.question, shape)[-2:]
            full += [{**settings, "optimizer_offload": 1.0} for settings in full]
            full += with_sharded_parameters(self.question, shape)[-2:]
            for layout in (replace(shape, **settings) for settings in full):
                missing = self._missing(held := self._held(layout))
                lacking.append((missing, layout))
                if self._short(held)[0] > 0 and layout.sharding == "optimizer":
                    moved = adam_on_host(self.question, layout, held)
                    lacking += [(self._missing(self._held(one)), one) for one in moved]
        if not lacking:
            return None
        return self.question.plan(min(lacking, key=lambda one: one[0])[1])

    def _fastest(
        self,
        bounded: Sequence[Bounded],
        most: int,
        limit: float,
    ) -> list[Plan]:
        """Return the choice, and the fastest plans of the fastest shapes, `most` in all.

        Their times are below a limit.
        """
        found: list[list[Plan]] = []
        bounded = sorted(bounded, key=lambda one: one[0])
        for place, (bound, shape, families) in enumerate(bounded):
            if bound >= limit:
                self.ruled_out[SLOWER] += (len(bounded) - place) * (families is TRIED)
                break
            plans = self._of_shape(shape, families, limit)
            if plans:
                insort(found, plans, key=lambda one: _rank(one[0]))
            if len(found) >= most:
                ranked = found[most - 1][0].time.step
                limit = min(limit, max(ranked, self.within * found[0][0].time.step))
        if not found:
            return []
        choice = self._choice([plan for plans in found for plan in plans], found[0][0])
        return [choice, *(plans[0] for plans in found if plans[0] is not choice)][:most]

    def _choice(self, plans: Sequence[Plan], fastest: Plan) -> Plan:
        """Return the leanest plan that takes about as long as the fastest, or that one."""
        leaner = [
            one
            for one in plans
            if one.time.step <= self.within * fastest.time.step
            and one.memory.total <= (1 - LEANER) * fastest.memory.total
            and one.memory.host <= fastest.memory.host
        ]
        return min(leaner, key=lambda one: one.memory.total, default=fastest)

    def _of_shape(self, shape: Layout, families: Sequence[Family], limit: float) -> list[Plan]:
        """Return the plans of a shape that take about as long as its fastest, that one first."""
        found: list[Plan] = []
        for family in families:
            timed = [(self._time(layout), layout) for layout in self._hopeful(family, shape)]
            for seconds, layout in sorted(timed, key=lambda one: one[0].step):
                if seconds.step >= limit:
                    break
                for one in self._fitting(family, layout, seconds):
                    if one.time.step < limit:
                        found.append(one)
                        limit = min(limit, self.within * one.time.step)
        return sorted(found, key=_rank)

    def _hopeful(self, family: Family, shape: Layout) -> list[Layout]:
        """Return the settings of a shape, or none if its leanest one lacks GPU memory."""
        settings = family.settings(self.question, shape)
        if not settings:
            return []
        held = self._held(replace(shape, **settings[-1]))
        lacking, _ = self._short(held)
        if lacking <= held.categories["optimizer"] * family.adam_on_host:
            return [replace(shape, **one) for one in settings]
        self._count_short(gpu=True, number=len(settings))
        return []

    def _fitting(self, family: Family, layout: Layout, seconds: Time | None) -> Iterator[Plan]:
        """Yield the plan of a layout if it fits and violates no constraint."""
        self.tried += 1
        held = self._held(layout)
        gpu, host = self._short(held)
        if family.adam_on_host and gpu > 0 >= host:
            for moved in adam_on_host(self.question, layout, held):
                yield from self._fitting(TRIED[0], moved, None)
            return
        if max(gpu, host) > 0:
            self._count_short(gpu=gpu > 0)
            return
        found = Plan(
            workload=self.question.workload(layout),
            cluster=self.cluster,
            memory=held,
            time=seconds or self._time(layout),
        )
        found = with_host_cap(found)
        broken = next(violations(found.workload, self.cluster), "")
        if not broken:
            yield found
            return
        self.ruled_out[broken] += 1
        self.refused = self.refused or broken

    def _count_short(self, *, gpu: bool, number: int = 1) -> None:
        self.ruled_out[f"too little {'GPU' if gpu else 'host'} memory"] += number

    def _time(self, layout: Layout) -> Time:
        return time(self.question.workload(layout), self.cluster)

    def _short(self, held: Memory) -> tuple[float, float]:
        return short(held, self.cluster)

    def _missing(self, held: Memory) -> float:
        """Return the bytes that GPU and host lack together."""
        return sum(max(0, size) for size in self._short(held))

    def _held(self, layout: Layout) -> Memory:
        return memory(self.question.workload(layout), self.kernels)


def _rank(one: Plan) -> tuple[float, float, float]:
    """Return the sort key of a plan: its time to four digits, then its host and GPU memory."""
    return (float(f"{one.time.step:.4g}"), one.memory.host, one.memory.total)
