# SPDX-License-Identifier: Apache-2.0
"""The same stage under every kind of parallelism trains the same model."""

import pytest

pytestmark = pytest.mark.slow

LAYOUTS = {"cp": {"cp": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}, "dp": {"dp": 2}}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, small_store):
    from tests.runs.conftest import TrainingRun

    folder = tmp_path_factory.mktemp("one_rank")
    return TrainingRun(folder, small_store, ranks=1, layout={}).finish()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_two_ranks_give_the_losses_of_one_at_each_of_20_steps(kind, training_run, one_rank):
    steps = training_run(kind, ranks=2, layout=LAYOUTS[kind]).finish()
    assert len(steps) == 20
    for ours, reference in zip(steps, one_rank, strict=True):
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-4), ours["step"]
        assert ours["samples"] == reference["samples"]
        assert ours["lr"] == reference["lr"]
