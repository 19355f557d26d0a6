# SPDX-License-Identifier: Apache-2.0
"""The job that trains a stage on this machine."""

import nemo_run

from recipes.checkpoints.marker import RECIPE
from recipes.resolved.read import folder_of, world_size
from slurm.entrypoint import train
from slurm.experiment import Job
from slurm.local_executor import local_executor


def training_job(recipe: nemo_run.Partial) -> Job:
    """Return the job that trains the stage on this machine, once its recipe is recorded."""
    task = nemo_run.Partial(train, config=str(folder_of(recipe) / RECIPE))
    return Job(recipe.log.name, task, local_executor(world_size(recipe)))
