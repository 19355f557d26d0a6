# SPDX-License-Identifier: Apache-2.0
"""A stage that trains short for a longer context trains the same on two ranks, and after a kill."""

from pathlib import Path

import pytest

from recipes.checkpoints.record import start_entry, start_entry_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TARGET = 2048
KINDS = {
    "pose": {"kind": "pose", "target_length": TARGET},
    "longrecipe": {"kind": "longrecipe", "target_length": TARGET, "sentences": "digits"},
    "gene": {"kind": "gene", "target_length": TARGET},
}
LAYOUTS = {"pose": {"cp": 2}, "longrecipe": {"cp": 2, "kind": "ring"}, "gene": {"pp": 2}}
STEPS = 7


@pytest.fixture(scope="module")
def start(tmp_path_factory, small_store):
    """Return the checkpoints of five plain steps, from which all begin."""
    from tests.runs.conftest import TrainingRun

    run = TrainingRun(tmp_path_factory.mktemp("start"), small_store, ranks=1, layout={}, steps=5)
    run.finish()
    return str(run.metrics.parent / "checkpoints")


@pytest.fixture(scope="module")
def plain(tmp_path_factory, small_store, start):
    from tests.runs.conftest import TrainingRun

    folder = tmp_path_factory.mktemp("plain")
    return TrainingRun(folder, small_store, ranks=1, layout={}, start=start, steps=STEPS).finish()


@pytest.mark.nightly  # the resume below draws on one rank; tests/data draws for several
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_draw_what_one_draws(kind, training_run, start, plain):
    options = {"positions": KINDS[kind], "start": start, "steps": STEPS}
    alone = training_run("alone", ranks=1, layout={}, **options).finish()
    two = training_run("two", ranks=2, layout=LAYOUTS[kind], **options).finish()
    assert len(alone) == STEPS
    for ours, reference in zip(two, alone, strict=True):
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-5), ours["step"]
        assert ours["samples"] == reference["samples"]
    consecutive = [step["loss"] for step in plain]
    assert [step["loss"] for step in alone] != pytest.approx(consecutive, rel=1e-4)


def test_a_resume_draws_what_would_have_come(training_run, start):
    options = {"positions": KINDS["pose"], "start": start, "steps": STEPS}
    whole = training_run("whole", ranks=1, layout={}, **options).finish()
    killed = training_run("killed", ranks=1, layout={}, every=5, **options)
    killed.kill_after(6)
    assert [step["loss"] for step in killed.finish()] == [step["loss"] for step in whole]
    newest = killed.metrics.parent / "checkpoints" / f"step={STEPS}"
    assert start_entry_of(newest) == start_entry(Path(start) / "step=5")
