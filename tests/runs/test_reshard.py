# SPDX-License-Identifier: Apache-2.0
"""A checkpoint written under one layout is the same model under another."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import Ranks
from tests.runs.conftest import NEMO, TIMEOUT_SECONDS
from tests.runs.train import evaluate_on_forked_rank

pytestmark = pytest.mark.slow

LONGHAUL = Path(sys.executable).parent / "longhaul"


def test_a_checkpoint_of_two_tensor_ranks_evaluates_the_same_under_two_context_ranks(
    training_run,
):
    from eval.run_folder import write_json
    from longhaul.jobs import records
    from recipes.resolved.stage import ResolvedStage
    from tests.runs.train import recipe

    run = training_run("tp", ranks=2, layout={"tp": 2}, steps=5)
    run.finish()
    records.record(ResolvedStage.of(recipe(run.options)), start="scratch")
    write_json(run.folder / "run.json", {"ladder": "tiny", "card": "tiny", "stages": ["tiny_512"]})
    done = subprocess.run(
        [LONGHAUL, "evaluate", "--run", run.folder, "--documents", "6", "--cp", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    of_context_ranks = losses(run.folder)
    options = {
        "run": str(run.folder), "stages": ["tiny_512"], "store": run.options["store"],
        "lengths": [512], "documents": 6, "tensor_parallel": 2,
    }  # fmt: skip
    output = str(run.folder / "output.log")
    with Ranks(evaluate_on_forked_rank, 2, options, output, server=NEMO) as ranks:
        ranks.results(TIMEOUT_SECONDS)
    assert of_context_ranks == pytest.approx(losses(run.folder), rel=1e-5)
    assert of_context_ranks != losses(run.folder)  # in another order of sums


def losses(run: Path) -> list[float]:
    """Return the losses by position of the evaluation that was written last."""
    result = json.loads((run / "eval" / "tiny_512.json").read_text())
    return result["by_position"]["loss"]
