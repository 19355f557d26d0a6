# SPDX-License-Identifier: Apache-2.0
"""A stage that carries the optimizer's state over goes on as the stage before would have."""

import json

import pytest

from tests.runs.train import SEQUENCES

pytestmark = pytest.mark.slow

FIRST = 5
"""Steps of the first stage; the whole run has twice as many."""


def test_two_stages_have_the_losses_of_one_with_the_same_schedule(training_run):
    layout = {"dp": 2}
    whole = training_run("whole", ranks=2, layout=layout, rate=2e-3, steps=2 * FIRST).finish()
    first = training_run("first", ranks=2, layout=layout, rate=2e-3, steps=FIRST)
    before = first.finish()

    def second(name: str, **options) -> list[dict]:
        run = training_run(
            name, ranks=2, layout=layout, start=str(first.metrics.parent / "checkpoints"),
            optimizer="carried", **options,
        )  # fmt: skip
        run.metrics.parent.mkdir(parents=True)
        # The samples of the first stage are passed over, as after a rewind: a stage reads from 0.
        passed = {
            "step": 0,
            "from_step": 0,
            "samples": [0, SEQUENCES * FIRST],
            "loss": None,
            "why": "",
        }
        (run.metrics.parent / "rewinds.jsonl").write_text(json.dumps(passed) + "\n")
        return run.finish()

    after = second("second", rate=2e-3, steps=FIRST)
    for figure in ("loss", "grad_norm", "lr"):
        joined = [step[figure] for step in (*before, *after)]
        assert joined == [step[figure] for step in whole], figure

    slower = second("slower", rate=1e-3, steps=2)
    assert [step["lr"] for step in slower] == [1e-3] * 2, "of its own schedule from the first step"
    assert slower[0]["loss"] == after[0]["loss"]
    assert slower[1]["loss"] != after[1]["loss"]
