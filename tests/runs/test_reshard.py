# SPDX-License-Identifier: Apache-2.0
"""A checkpoint written under one layout is the same model under another."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

LONGHAUL = Path(sys.executable).parent / "longhaul"


def test_a_checkpoint_of_two_tensor_ranks_evaluates_the_same_under_two_context_ranks(
    training_run,
):
    from eval.results import write_json
    from longhaul import stages
    from tests.runs.train import recipe

    run = training_run("tp", ranks=2, layout={"tp": 2}, steps=5)
    run.finish()
    stages.record(recipe(run.options), start="scratch")
    write_json(run.folder / "run.json", {"ladder": "tiny", "card": "tiny", "stages": ["tiny_512"]})
    losses = {}
    for layout in (("--tensor-parallel", "2"), ("--context-parallel", "2")):
        done = subprocess.run(
            [LONGHAUL, "evaluate", "--run", run.folder, "--documents", "6", *layout],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        result = json.loads((run.folder / "eval" / "tiny_512.json").read_text())
        losses[layout[0]] = result["by_position"]["loss"]
    assert losses["--context-parallel"] == pytest.approx(losses["--tensor-parallel"], rel=1e-5)
