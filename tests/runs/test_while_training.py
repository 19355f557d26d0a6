# SPDX-License-Identifier: Apache-2.0
"""A model that is evaluated while it trains has the training losses of one that is not."""

import math

import pytest

from tests.runs.conftest import TrainingRun

pytestmark = pytest.mark.slow

MEASURED = (
    "heldout_loss", "heldout_by_quarter", "heldout_by_length", "passkey_nats", "evaluation_seconds",
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "overlap"),
    [pytest.param("cp", False, marks=pytest.mark.nightly), ("dp", True)],
    ids=["cp", "dp"],
)
def test_an_evaluation_changes_no_step_and_is_in_the_step_log(
    tmp_path, store_of_lengths, kind, overlap
):
    """With DP the optimizer is sharded, and every step requires that gathers overlap."""
    shared = {"ranks": 2, "layout": {kind: 2}, "steps": 4, "overlap": overlap}
    plain = TrainingRun(tmp_path / "plain", store_of_lengths, **shared).finish()
    run = TrainingRun(tmp_path / "evaluated", store_of_lengths, **shared, evaluate_every=2)
    evaluated = run.finish()
    assert [step["loss"] for step in evaluated] == [step["loss"] for step in plain]
    assert [step["grad_norm"] for step in evaluated] == [step["grad_norm"] for step in plain]
    of_steps = [step["step"] for step in evaluated if set(MEASURED) <= set(step)]
    assert of_steps == [2, 4]
    assert not any(set(MEASURED) & set(step) for step in plain)
    last = evaluated[-1]
    assert last["heldout_loss"] == pytest.approx(sum(last["heldout_by_quarter"]) / 4)
    assert last["heldout_loss"] < math.log(512)
    assert 0 < last["passkey_nats"] < 2 * math.log(512)
    by_length = last["heldout_by_length"]
    assert {"64", "128", "256"} <= set(by_length) <= {"64", "128", "256", "512"}
    assert all(0 < loss < math.log(512) for loss in by_length.values())
