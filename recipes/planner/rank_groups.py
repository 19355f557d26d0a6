# SPDX-License-Identifier: Apache-2.0
"""Which ranks work together, and over which link.

Megatron-Core numbers ranks TP first, then CP, DP, PP (its order `tp-cp-ep-dp-pp`): TP ranks are
neighbours, so they share a node's fast link where TP divides it; of context ranks the inner
all-to-all are the next neighbours, the ring goes round them.
"""

from dataclasses import dataclass

from recipes.planner.workload import Job
from recipes.spec.cluster import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The ranks of one kind of parallelism, by the group that rank 0 is in."""

    kind: str
    size: int
    stride: int
    """Between neighbours of the group."""
    inside: bool
    """Whether the fast link joins the whole group."""

    @property
    def ranks(self) -> list[int]:
        """The ranks of rank 0's group."""
        return [place * self.stride for place in range(self.size)]

    def __str__(self) -> str:
        shown = ", ".join(str(rank) for rank in self.ranks[:4])
        more = f", ... {self.ranks[-1]}" if self.size > 4 else ""
        link = "fast link" if self.inside else "network"
        return f"{self.kind} {self.size}: ranks {shown}{more} ({link})"


def rank_map(job: Job, cluster: Cluster) -> list[Group]:
    """Return the groups of more than one rank, from the innermost out."""
    layout, cp = job.layout, job.degrees
    sizes = (
        ("TP", layout.tp),
        ("CP all-to-all", cp.ulysses),
        ("CP ring", cp.ring),
        ("DP", layout.dp),
        ("PP", layout.pp),
    )
    found, stride = [], 1
    for kind, size in sizes:
        span = stride * size
        if size > 1:
            inside = cluster.joins(span)
            found.append(Group(kind=kind, size=size, stride=stride, inside=inside))
        stride = span
    return found
