# SPDX-License-Identifier: Apache-2.0
"""Weights are met over the stage and in each step: constant, moving, over steps of two lengths."""

import numpy as np
import pytest

from data.mixture.config import Mix, OtherLength
from data.mixture.groups import Group
from data.mixture.schedule import Schedule


def group(weight: float, end: float | None = None, length: int = 64) -> Group:
    return Group(
        source="web", at_least=1, below=None, seq_length=length, weight=weight,
        end_weight=weight if end is None else end, documents=1, tokens=1,
    )  # fmt: skip


def schedule(groups, *, mix=None, steps=250, rows=4, filled=None) -> Schedule:
    mix = mix or Mix()
    return Schedule.of(mix, groups, steps=steps, rows=rows, filled=filled or [1.0] * len(groups))


def test_shares_are_met_within_a_row_after_every_step() -> None:
    weights = [0.501, 0.3, 0.15, 0.049]
    counts = schedule([group(weight) for weight in weights]).counts
    assert (counts.sum(1) == 4).all()
    owed = np.arange(1, 251)[:, None] * 4 * np.array(weights)
    assert np.abs(np.cumsum(counts, 0) - owed).max() <= 1
    assert np.abs(counts.sum(0) / 1000 - weights).max() <= 0.001


def test_a_group_that_is_padded_has_more_rows() -> None:
    counts = schedule([group(0.5), group(0.5)], filled=[1.0, 0.5]).counts.sum(0)
    tokens = counts * [1.0, 0.5]
    assert tokens[0] / tokens.sum() == pytest.approx(0.5, abs=0.005)


def test_weights_move_after_the_point_where_the_ramp_begins() -> None:
    counts = schedule(
        [group(1.0, 0.5), group(0.0, 0.5)], mix=Mix(ramp_from=0.8), steps=1000, rows=10
    ).counts[:, 1]
    assert counts[:800].sum() == 0
    assert counts[800:].sum() == pytest.approx(2000 * 0.25, abs=2)
    assert counts[990:].mean() == pytest.approx(5, abs=0.2)
    assert counts[895:905].mean() == pytest.approx(2.5, abs=0.2)


def test_steps_of_another_length_are_spread_evenly_and_never_mixed() -> None:
    mix = Mix(other_lengths=[OtherLength(seq_length=4, steps=0.08)])
    counts = schedule([group(1.0), group(1.0, length=4)], mix=mix, steps=1000).counts
    assert ((counts > 0).sum(1) == 1).all()
    short = np.flatnonzero(counts[:, 1])
    assert short.size == 80
    assert set(np.diff(short)) <= {12, 13}


def test_rows_before_a_step_are_the_sum_of_earlier_ones() -> None:
    found = schedule([group(0.7), group(0.3)], steps=9)
    assert (found.before[1:] == np.cumsum(found.counts, 0)[:-1]).all()
    assert (found.before[0] == 0).all()
