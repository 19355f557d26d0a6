# SPDX-License-Identifier: Apache-2.0
"""The job that trains a stage on this machine."""

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
    config = str(stage.folder / RECIPE)
    task = nemo_run.Partial(train, config=config)
    if evaluate_every is not None:
        task = nemo_run.Partial(train_and_evaluate, config=config, every=evaluate_every)
    return Job(stage.name, task, local_executor(stage.layout.world_size))
