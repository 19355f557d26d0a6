# SPDX-License-Identifier: Apache-2.0
"""Rows of each group in each step: the weights of a mix, met as nearly as whole rows allow.

Every step has the rows that bring the tokens so far closest to the sum of the weights so far: each
group gets the whole part of what it is owed, and the groups with the largest remainders one row
more. A group is thus never more than a row away from its share, whether weights are constant or
move, and the rows of a step come from as many groups as it has room for. Steps of another length
are spread evenly in the same way; all rows of a step have one length.

The schedule depends on the mix, the number of steps and the rows of a step alone, so a resume, or a
run on other ranks, has the same one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.mixture.config import Mix
from data.mixture.groups import Group


@dataclass(frozen=True, eq=False)
class Schedule:
    """Which groups the rows of each step are of."""

    counts: NDArray[np.int32]
    """Rows [steps, groups] of each step."""
    before: NDArray[np.int64]
    """Rows [steps, groups] of each group in all earlier steps."""

    @classmethod
    def of(
        cls,
        mix: Mix,
        groups: Sequence[Group],
        *,
        steps: int,
        rows: int,
        filled: Sequence[float],
    ) -> "Schedule":
        """Return the schedule of a stage.

        Args:
            rows: sequences of a step.
            filled: share [groups] of a row of each group that is tokens, not padding. Weights are
                of tokens, so a group that is padded more has more rows.
        """
        lengths = list(dict.fromkeys(group.seq_length for group in groups))
        of_step = np.asarray(lengths)[_lengths_of(mix, lengths, steps)]
        counts = np.zeros((steps, len(groups)), np.int32)
        asked = weights_asked(mix, groups, steps)
        for length in lengths:
            members = [at for at, group in enumerate(groups) if group.seq_length == length]
            own = np.flatnonzero(of_step == length)
            weights = asked[own[:, None], members] / np.asarray(filled)[members]
            weights /= weights.sum(1, keepdims=True)
            counts[own[:, None], members] = _apportioned(weights, rows)
        before = np.cumsum(counts, 0, dtype=np.int64) - counts
        return cls(counts, before)


def weights_asked(mix: Mix, groups: Sequence[Group], steps: int) -> NDArray[np.float64]:
    """Return the share [steps, groups] of the tokens of each step that a mix asks of each group.

    It is 0 for the groups of another length than the step's; a row adds up to 1.
    """
    lengths = list(dict.fromkeys(group.seq_length for group in groups))
    of_step = np.asarray(lengths)[_lengths_of(mix, lengths, steps)]
    moved = _moved(mix, np.arange(steps), steps)[:, None]
    start, end = (
        np.array([getattr(group, name) for group in groups]) for name in ("weight", "end_weight")
    )
    weights = (1 - moved) * start + moved * end
    of_group = np.array([group.seq_length for group in groups])
    return np.asarray(np.where(of_step[:, None] == of_group, weights, 0.0))


def _lengths_of(mix: Mix, lengths: list[int], steps: int) -> NDArray[np.int64]:
    """Return for each step the number of its length; other lengths are spread evenly."""
    others = [other.steps for other in mix.other_lengths]
    weights = np.tile([1 - sum(others), *others], (steps, 1))
    return np.asarray(_apportioned(weights, 1).argmax(1))


def _moved(mix: Mix, steps: NDArray[np.int64], of: int) -> NDArray[np.float64]:
    """Return how far the weights of each step have moved, from 0 to 1."""
    if mix.ramp_from == 1:
        return np.zeros(steps.size)
    return np.clip(((steps + 0.5) / of - mix.ramp_from) / (1 - mix.ramp_from), 0, 1)


def _apportioned(weights: NDArray[np.float64], rows: int) -> NDArray[np.int32]:
    """Return whole rows [steps, groups] whose sums stay within one of `rows` times the weights."""
    counts = np.zeros(weights.shape, np.int32)
    owed = np.zeros(weights.shape[1])
    for step, share in enumerate(weights):
        owed += share * rows
        given = np.maximum(np.floor(owed + 1e-9), 0).astype(np.int64)
        while (spare := rows - int(given.sum())) > 0:
            given[np.argsort(given - owed, kind="stable")[:spare]] += 1
        while int(given.sum()) > rows:
            given[np.argmax(np.where(given > 0, given - owed, -np.inf))] -= 1
        owed -= given
        counts[step] = given
    return counts
