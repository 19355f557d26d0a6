# SPDX-License-Identifier: Apache-2.0
"""A stage that is killed goes on as if it had not been, also the second time.

The one that is not killed runs under torchrun: forked ranks train as torchrun's do.
"""

import pytest

pytestmark = pytest.mark.slow


def test_a_run_killed_twice_has_the_losses_and_samples_of_one_that_was_not(training_run):
    layout = {"cp": 2}
    whole = training_run("whole", ranks=2, layout=layout).finish_under_torchrun()
    killed = training_run("killed", ranks=2, layout=layout)
    killed.kill_after(7)
    killed.kill_after(13)
    resumed = killed.finish()
    assert [step["step"] for step in resumed] == list(range(1, 21))
    assert [step["loss"] for step in resumed] == [step["loss"] for step in whole]
    assert [step["grad_norm"] for step in resumed] == [step["grad_norm"] for step in whole]
    samples = [step["samples"] for step in resumed]
    assert samples == [[2 * n, 2 * n + 1] for n in range(20)]
    kept = [folder.name for folder in (killed.metrics.parent / "checkpoints").iterdir()]
    assert kept == ["step=20"]
