# SPDX-License-Identifier: Apache-2.0
"""A save that fails on one rank is tried again and ends no training, but for the last."""

import json

import pytest

pytestmark = pytest.mark.slow


def test_saves_that_fail_on_a_rank_are_tried_again_and_only_the_last_has_to_succeed(training_run):
    run = training_run("run", ranks=2, layout={"cp": 2}, failing_saves=True)
    stage = run.metrics.parent
    with pytest.raises(RuntimeError, match=r"SaveFailedError: step 20 could not be saved .*15"):
        run.finish()
    lines = [json.loads(line) for line in (stage / "health.jsonl").read_text().splitlines()]
    found = [(line["step"], line["kind"]) for line in lines]
    assert found[:4] == [
        (5, "failed_save"), (5, "failed_save"), (10, "disk_full"), (15, "failed_save"),
    ]  # fmt: skip
    assert set(found[4:]) == {(20, "failed_save")}
    assert "No space left on device" in lines[2]["said"]
    assert "was ended by signal 9" in lines[3]["said"]
    assert [path.name for path in (stage / "checkpoints").iterdir()] == ["step=15"]
    again = training_run("run", ranks=2, layout={"cp": 2})
    assert [step["step"] for step in again.finish()] == list(range(1, 21))
    assert [path.name for path in (stage / "checkpoints").iterdir()] == ["step=20"]
