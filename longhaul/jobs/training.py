# SPDX-License-Identifier: Apache-2.0
"""The job that trains a stage on this machine."""

import nemo_run

from recipes.checkpoints.marker import RECIPE
from recipes.resolved.stage import ResolvedStage
from slurm.entrypoint import train
from slurm.experiment import Job
from slurm.local_executor import local_executor


def training_job(stage: ResolvedStage) -> Job:
    """Return the job that trains the stage on this machine, once its recipe is recorded."""
    task = nemo_run.Partial(train, config=str(stage.folder / RECIPE))
    return Job(stage.name, task, local_executor(stage.layout.world_size))
