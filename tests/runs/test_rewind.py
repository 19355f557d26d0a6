# SPDX-License-Identifier: Apache-2.0
"""A batch that breaks the loss: the run goes back by itself and reads on behind that batch."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import nemo_run as run
import pytest

from longhaul.jobs import records, training
from longhaul.jobs.watched_training import train_watched
from recipes.resolved.stage import ResolvedStage
from slurm.experiment import Job, run_in_order
from tests.ranks import TREE
from tests.runs import poison
from tests.runs.train import SEQUENCES, STEPS, recipe
from tests.warm_start import path_with

pytestmark = pytest.mark.slow

BROKEN = 12
"""The step that reads the bad sample first; checkpoints are at every fifth."""
BAD = SEQUENCES * BROKEN - 1
"""The last sample of that step."""


@pytest.fixture(autouse=True)
def _programs_of_this_environment(monkeypatch):
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )


def _job(folder, store) -> Job:
    """Return the job of `longhaul pretrain`, with a bad sample planted in what its ranks read."""
    made = recipe({"run": str(folder), "store": str(store), "layout": {}})
    stage = replace(
        ResolvedStage.of(made), alert=f"sh -c 'cat >> {folder}/alerts'", debug_comm=True
    )
    records.record(stage, start="scratch")
    job = training.training_job(stage)
    assert job.task.__fn_or_cls__ is train_watched
    assert job.executor.env_vars["NCCL_DEBUG_FILE"] == str(stage.folder / "nccl_%h_%p.log")
    job.executor.env_vars["PYTHONPATH"] = path_with(TREE)
    task = run.Partial(poison.train, place=BAD, **job.task.__arguments__)
    return replace(job, task=task)


def test_a_run_passes_over_the_batch_that_breaks_its_loss(tmp_path, small_store):
    told: list[str] = []
    run_in_order("rewind", [_job(tmp_path, small_store)], tmp_path / "launch", told.append)
    stage = tmp_path / "stages" / "tiny_512"
    (rewind,) = [json.loads(line) for line in (stage / "rewinds.jsonl").open()]
    assert (rewind["step"], rewind["from_step"], rewind["samples"]) == (
        BROKEN,
        10,
        [10 * SEQUENCES, 2 * SEQUENCES],
    )
    steps = [json.loads(line) for line in (stage / "metrics.jsonl").open()]
    assert [one["step"] for one in steps] == list(range(1, STEPS + 1))
    assert [one["samples"] for one in steps] == [[2 * n, 2 * n + 1] for n in range(STEPS)]
    (part,) = rewind["micro_batches"]
    assert part == {"ranks": [0], "micro_batch": 1, "samples": [BAD]}
    named = rewind["documents"]
    assert {one["sample"] for one in named} == {BAD}
    assert {one["source"] for one in named} == {"documents"}
    words = ", ".join(f"documents:{one['document']}" for one in named)
    assert told == [
        f"tiny_512 continues: step {BROKEN}: the loss is nan, first in micro-batch 2 of rank 0 "
        f"(sample {BAD}), documents {words}; run again, the stage resumes from "
        "its last checkpoint without the batches from there to this step"
    ]
    (finding,) = [json.loads(line) for line in (stage / "health.jsonl").open()]
    assert (finding["kind"], finding["step"], finding["ranks"]) == ("not_finite", BROKEN, [0])
    assert finding["documents"] == named
    (alerted,) = [json.loads(line) for line in (tmp_path / "alerts").open()]
    assert alerted == {"stage": str(stage), **finding}
