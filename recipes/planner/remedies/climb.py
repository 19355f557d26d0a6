# SPDX-License-Identifier: Apache-2.0
"""Search for remedies for a stage that runs out of memory, the cheapest first.

Remedies have a fixed order. Each is tried alone on the current layout, and together with the
previous ones that helped. One may have several layouts (sizes of CP, for example): of those that
violate no constraint the fastest that fits is taken, or the one that lacks least. The climb ends
when it fits, and is repeated without each one taken as long as the result is faster, so that full
recompute is not chosen if offload is enough. The `cure` omits what is not needed. Those not
tried on GPUs (`UNTRIED`) are used only if the rest does not fit these GPUs at this length.
Bytes and seconds are the planner's; `unexplained` are bytes that a log shows but the planner does
not predict, and no remedy is assumed to reduce them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from recipes.planner.feasibility import before_planning, violations
from recipes.planner.plan import Plan, capped
from recipes.planner.rank_groups import rank_map
from recipes.planner.remedies.overrides import override_words
from recipes.planner.remedies.proposals import REMEDIES
from recipes.planner.workload import Workload
from recipes.spec.cluster import Cluster
from recipes.spec.units import GiB

LEAST_HELP = 0.1 * GiB
"""Least saving for which a remedy is taken."""
REBUILDING = frozenset({"recompute kept_attention", "recompute full"})
"""Remedies that are left out together, since one replaces the other."""
UNTRIED = frozenset({"sharded parameters", "Adam on the host", "FP8"})
"""Remedies not tried in whole runs on GPUs, the planner's last resorts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """Its plan alone, and together with the previous ones."""

    name: str
    alone: Plan | None = None
    """None if it is not possible."""
    fits: bool = False
    """Whether the stage fits with it alone."""
    why_not: str = ""
    words: tuple[str, ...] = ()
    """Overrides that apply it to the recipe."""
    together: Plan | None = None
    """Plan with the previous remedies; None if it did not help there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cure:
    """A set of remedies under which the stage fits."""

    names: tuple[str, ...]
    plan: Plan
    words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedies:
    """The remedies for a plan."""

    ladder: tuple[Remedy, ...]
    cure: Cure | None
    """None if the whole ladder does not fit; empty if nothing is lacking."""


def remedies(start: Plan, *, unexplained: float = 0.0, more_groups: bool = True) -> Remedies:
    """Return the remedies for a plan, and the first set of remedies under which it fits.

    Without `more_groups` none has more groups of ranks, each with buffers of NCCL, than the plan.
    """
    most = math.inf if more_groups else len(rank_map(start.workload, start.cluster))
    climb = _Climb(start.cluster, unexplained, most_groups=most)
    together, taken = climb.fastest(start)
    ladder = []
    for name in REMEDIES:
        found = climb.best(start.workload, name)
        if isinstance(found, str):
            ladder.append(Remedy(name=name, why_not=found, together=together.get(name)))
            continue
        words = tuple(override_words(start.workload, found.workload))
        ladder.append(
            Remedy(
                name=name,
                alone=found,
                fits=not climb.lacking(found),
                words=words,
                together=together.get(name),
            )
        )
    return Remedies(ladder=tuple(ladder), cure=climb.least(start, taken))


class _Climb:
    """The search on one cluster."""

    def __init__(self, cluster: Cluster, unexplained: float, *, most_groups: float) -> None:
        self.cluster, self.unexplained, self.most_groups = cluster, unexplained, most_groups
        self._known: dict[tuple[str, int, str], Plan | str] = {}

    def lacking(self, one: Plan) -> float:
        """Return the bytes that GPU and host lack."""
        return max(one.short + self.unexplained, 0.0) + max(one.host_short, 0.0)

    def best(self, workload: Workload, name: str) -> Plan | str:
        """Return the best plan that a remedy makes of a workload, or why there is none."""
        key = (name, workload.seq_length, repr(workload.layout))
        if key not in self._known:  # climbs share their first remedies
            self._known[key] = self._best(workload, name)
        return self._known[key]

    def _best(self, workload: Workload, name: str) -> Plan | str:
        found = REMEDIES[name](workload, self.cluster)
        if isinstance(found, str):
            return found
        lawful, why = [], ""
        for one in found:
            broken = before_planning(one, self.cluster)
            if not broken:
                made = capped(one, self.cluster)
                broken = next(violations(made.workload, self.cluster), "")
                if not broken and len(rank_map(one, self.cluster)) > self.most_groups:
                    broken = "it adds a group of ranks, with more buffers of NCCL"
            if broken:
                why = why or broken
            else:
                lawful.append(made)
        if not lawful:
            return why
        return min(lawful, key=self._cost)

    def _cost(self, one: Plan) -> tuple[float, ...]:
        lacking = self.lacking(one)
        return (lacking, one.gpus, -one.workload.seq_length, one.time.step)

    def _price(self, one: Plan) -> tuple[float, ...]:
        """Return the sort key of a plan that fits: its cost, then its bytes."""
        return (one.gpus, -one.workload.seq_length, _seconds(one), one.memory.total)

    def fastest(self, start: Plan) -> tuple[dict[str, Plan], list[str]]:
        """Return the climb with the best end, with untested remedies only if it needs them.

        They are needed if without them it does not fit, takes more GPUs or shortens the stage.
        """
        tried = self._fastest(start, UNTRIED)
        end = self._end(start, tried)
        if end[:-1] <= (0.0, start.gpus, -start.workload.seq_length):
            return tried
        anything = self._fastest(start, frozenset())
        return anything if self._end(start, anything)[:-1] < end[:-1] else tried

    def _fastest(self, start: Plan, left_out: frozenset[str]) -> tuple[dict[str, Plan], list[str]]:
        """Return the climb with the best end: the first, or one without some of its remedies."""
        best = self.climb(start, left_out)
        if not best[1]:
            return best
        while True:
            fewer = [left_out | names for names in (*({name} for name in best[1]), REBUILDING)]
            climbs = [(self.climb(start, names), names) for names in fewer]
            other, names = min(climbs, key=lambda one: self._end(start, one[0]))
            if self._end(start, other) >= self._end(start, best):
                return best
            best, left_out = other, names

    def _end(self, start: Plan, climb: tuple[dict[str, Plan], list[str]]) -> tuple[float, ...]:
        plans, taken = climb
        last = plans[taken[-1]] if taken else start
        return (*self._cost(last)[:-1], _seconds(last))

    def climb(self, start: Plan, left_out: frozenset[str]) -> tuple[dict[str, Plan], list[str]]:
        """Return the plan after each remedy, and those taken, until it fits or nothing helps."""
        found: dict[str, Plan] = {}
        taken: list[str] = []
        here, before = start, math.inf
        while 0 < self.lacking(here) < before:  # a remedy may help only after another
            before = self.lacking(here)
            for name in REMEDIES:
                if name in left_out or not self.lacking(here):
                    continue
                one = self.best(here.workload, name)
                if isinstance(one, str) or not self._helps(here, one):
                    continue
                here = found[name] = one
                taken.append(name)
        return found, taken

    def _helps(self, here: Plan, one: Plan) -> bool:
        lacking = self.lacking(here)
        return self.lacking(one) <= lacking - min(LEAST_HELP, lacking)

    def least(self, start: Plan, taken: Iterable[str]) -> Cure | None:
        """Return the remedies that are needed, leaving out the most expensive first.

        Those that cost neither time nor GPUs stay: free bytes are a margin for errors of the plan.
        """
        names = list(taken)
        best = self._after(start, names)
        if self.lacking(best):
            return None
        for place in reversed(range(len(names))):
            fewer = names[:place] + names[place + 1 :]
            found = self._after(start, fewer)
            if not self.lacking(found) and self._price(found) <= self._price(best):
                names, best = fewer, found
        return Cure(
            names=tuple(names),
            plan=best,
            words=tuple(override_words(start.workload, best.workload)),
        )

    def _after(self, start: Plan, names: Iterable[str]) -> Plan:
        here = start
        for name in names:
            one = self.best(here.workload, name)
            if not isinstance(one, str):
                here = one
        return here


def _seconds(one: Plan) -> float:
    """Return the seconds of a remedy to three digits, the precision of the planner."""
    return float(f"{one.time.step:.3g}")
