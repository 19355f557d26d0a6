# SPDX-License-Identifier: Apache-2.0
"""Assign the rows of a step to data ranks and micro-batches, by the work of their attention.

If tokens attend only within their documents, a row with one document of S tokens takes S^2 units
and a row of many short ones next to none. All ranks wait for the slowest, so the rows of a step are
given out longest first, each to the rank with the least work that has a place left (LPT, Graham
1969). Each rank then takes its rows in order of work, so that the micro-batches that run at the
same time on different ranks are alike in work.
"""

import heapq
from collections.abc import Sequence


def balanced(work: Sequence[float], ranks: int) -> list[list[int]]:
    """Return the rows of each rank, the same number each, those with most work first.

    Rows with equal work keep their order. Raises ValueError if the rows do not divide evenly.
    """
    each, rest = divmod(len(work), ranks)
    if rest:
        raise ValueError(f"{len(work)} rows do not divide evenly over {ranks} ranks")
    shares: list[list[int]] = [[] for _ in range(ranks)]
    least = [(0.0, rank) for rank in range(ranks)]
    for row in sorted(range(len(work)), key=lambda row: -work[row]):
        total, rank = heapq.heappop(least)
        shares[rank].append(row)
        if len(shares[rank]) < each:
            heapq.heappush(least, (total + work[row], rank))
    return shares


def imbalance(work: Sequence[float], shares: Sequence[Sequence[int]]) -> float:
    """Return the work of the rank with most of it over the average; 1 if there is none."""
    totals = [sum(work[row] for row in rows) for rows in shares]
    average = sum(totals) / len(totals)
    return max(totals) / average if average else 1.0
