# SPDX-License-Identifier: Apache-2.0
"""A save that fails on one rank is tried again and ends no training, but for the last."""

import json

import pytest

from recipes.checkpoints.marker import steps_taken

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "how", [pytest.param("at once", marks=pytest.mark.nightly), "in the background"]
)
def test_a_save_that_fails_on_a_rank_is_tried_again_and_only_the_last_ends_a_training(
    training_run, how
):
    run = training_run("run", ranks=2, layout={"cp": 2}, failing_saves=how)
    stage = run.metrics.parent
    with pytest.raises(RuntimeError, match=r"SaveFailedError: step 20 could not be saved"):
        run.finish()
    assert [step["step"] for step in run.steps()] == list(range(1, 21))
    lines = [json.loads(line) for line in (stage / "health.jsonl").read_text().splitlines()]
    said = {(line["step"], line["kind"]): line["said"] for line in lines}
    assert list(said) == [
        (5, "failed_save"), (10, "disk_full"), (15, "failed_save"), (20, "failed_save"),
    ]  # fmt: skip
    assert "No space left on device" in said[10, "disk_full"]
    assert "killed" in said[15, "failed_save"]
    assert how != "at once" or "the training fails if its last save does" in said[20, "failed_save"]
    (kept,) = (stage / "checkpoints").iterdir()  # no remains of those that failed
    assert steps_taken(stage / "checkpoints") == int(kept.name.removeprefix("step="))
    assert how != "at once" or kept.name == "step=15"
