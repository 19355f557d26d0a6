# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks, and the link that each group communicates over.

Megatron-Core numbers ranks TP first, then CP, DP, PP (its order `tp-cp-ep-dp-pp`). TP ranks are
neighbours, so they share the fast link of a node if TP divides it. Of the context ranks those of
the inner all-to-all come next, then those of the ring. The groups of experts are made of the same
ranks: ETP first, then EP.
"""

from dataclasses import dataclass

from recipes.planner.workload import Workload
from recipes.spec.cluster import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The group of rank 0 in one kind of parallelism."""

    kind: str
    size: int
    stride: int
    """Distance between neighbours of the group."""
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


def rank_map(workload: Workload, cluster: Cluster) -> list[Group]:
    """Return the groups of more than one rank, the innermost first, then those of experts."""
    layout, cp = workload.layout, workload.degrees
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
            inside = cluster.joins(span, layout.world_size)
            found.append(Group(kind=kind, size=size, stride=stride, inside=inside))
        stride = span
    if layout.ep > 1:
        inside = cluster.joins(layout.expert_tp * layout.ep, layout.world_size)
        found.append(Group(kind="EP", size=layout.ep, stride=layout.expert_tp, inside=inside))
    return found
