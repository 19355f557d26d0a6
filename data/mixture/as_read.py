# SPDX-License-Identifier: Apache-2.0
"""How many tokens of each source a stage has read, and the shares that its mix asked for.

It follows from the rows of the steps, so training records nothing for it. Padding is not counted;
a token that two pieces of a document share (`Mix.overlap`) counts as often as it is read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.mixture.config import Mix
from data.mixture.schedule import weights_asked
from data.mixture.stage_rows import StageRows


class SourceRead(NamedTuple):
    """What a stage has read of one source."""

    source: str
    share_asked: float
    """Of the tokens, by the mix, on average over the steps done."""
    share_read: float
    tokens: int


def read_by_source(
    rows: StageRows, mix: Mix, done: int, skipped: Sequence[tuple[int, int]] = ()
) -> list[SourceRead]:
    """Return what the first `done` steps of a stage have read of each source of its mix.

    Args:
        skipped: windows of samples that the run has skipped: the first and the count of each.
    """
    sequences = int(rows.schedule.counts[0].sum())
    weights = weights_asked(mix, rows.groups, rows.steps)
    tokens, asked = np.zeros(len(rows.groups), np.int64), np.zeros(len(rows.groups))
    for number in range(0, done * sequences, sequences):
        over = sum(count for first, count in skipped if number >= first)
        step = (number + over) // sequences
        tokens += rows.tokens(step)
        asked += weights[step % rows.steps]
    return [
        SourceRead(
            source,
            float(asked[of_source].sum() / done),
            float(tokens[of_source].sum() / tokens.sum()),
            int(tokens[of_source].sum()),
        )
        for source in dict.fromkeys(group.source for group in rows.groups)
        if (of_source := [at for at, one in enumerate(rows.groups) if one.source == source])
    ]
