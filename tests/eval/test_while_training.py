# SPDX-License-Identifier: Apache-2.0
"""Measurements while training are spaced so that they take at most 1% of the time."""

import pytest

from eval.while_training import (
    SHARE,
    WhileTraining,
    expected_cost,
    following,
    steps_between,
)


@pytest.mark.parametrize(("cost", "step_seconds"), [(0.5, 2.0), (30.0, 20.0), (0.001, 10.0)])
def test_measurements_take_at_most_their_share_of_the_steps(cost, step_seconds):
    trained = spent = 0.0
    measured, due = 0, steps_between(cost, spent, trained, step_seconds)
    for step in range(1, 5001):
        trained += step_seconds
        if step == due:
            spent += cost
            measured += 1
            assert spent <= SHARE * trained * (1 + 1e-9)
            due = step + max(1, steps_between(cost, spent, trained, step_seconds))
    assert measured >= min(4999, SHARE * trained / cost * 0.9)


def test_a_fixed_interval_measures_at_its_multiples_also_after_a_resume():
    assert following(0, 50, fixed=True) == 50
    assert following(130, 50, fixed=True) == 150
    assert following(130, 67, fixed=False) == 197


def test_a_negative_interval_is_refused():
    with pytest.raises(ValueError, match="every is -1; expected 0 or more steps"):
        WhileTraining(store="", seq_length=512, tokens_per_batch=2048, every=-1)


def test_time_that_was_not_used_makes_no_row_of_measurements():
    evaluations = WhileTraining(store="", seq_length=512, tokens_per_batch=2048)
    evaluations.trained, evaluations.steps, evaluations.spent = 2000.0, 1000, 1.0
    evaluations.costs = [0.5]
    assert evaluations._too_early() == 0
    assert evaluations._wait_after() == 25  # of 2 s each, of which 0.5 s are 1%
    evaluations.spent = 30.0
    assert evaluations._wait_after() == evaluations._too_early() == 525


def test_after_a_stall_no_measurement_is_due_before_the_steps_pay_for_it():
    assert steps_between(cost=5.0, spent=5.0, trained=560.0, step_seconds=1.0) == 440
    assert steps_between(cost=5.0, spent=5.0, trained=1000.0, step_seconds=1.0) == 0


@pytest.mark.parametrize(("costs", "expected"), [([1, 1, 0.4], 0.8), ([1, 1, 4], 4), ([2], 2)])
def test_a_measurement_is_not_expected_to_be_as_quick_as_one_that_was_quicker_than_most(
    costs, expected
):
    assert expected_cost(costs) == pytest.approx(expected)
