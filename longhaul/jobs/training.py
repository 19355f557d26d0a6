# SPDX-License-Identifier: Apache-2.0
"""The task that trains a stage, and the job that does so on this machine."""

from typing import Any

import nemo_run

from longhaul.jobs.evaluated_training import train_and_evaluate
from recipes.checkpoints.marker import RECIPE
from recipes.resolved.stage import ResolvedStage
from slurm.entrypoint import train
from slurm.experiment import Job
from slurm.local_executor import local_executor


def training_job(stage: ResolvedStage, evaluate_every: int | None = None) -> Job:
    """Return the job that trains the stage on this machine, once its recipe is recorded.

    With `evaluate_every` it evaluates the model every so many steps (0: by its own time).
    """
    task = training_task(stage, evaluate_every)
    return Job(stage.name, task, local_executor(stage.layout.world_size))


def training_task(
    stage: ResolvedStage, evaluate_every: int | None, **checks: Any
) -> nemo_run.Partial:
    """Return what a rank of the stage runs; `checks` are those of `slurm.entrypoint.train`."""
    config = str(stage.folder / RECIPE)
    if evaluate_every is None:
        return nemo_run.Partial(train, config=config, **checks)
    return nemo_run.Partial(train_and_evaluate, config=config, every=evaluate_every, **checks)
