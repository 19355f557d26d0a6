# SPDX-License-Identifier: Apache-2.0
"""The task that trains a stage, and the job that does so on this machine."""

from typing import Any

import nemo_run

from longhaul.jobs.watched_training import train_watched
from recipes.checkpoints.marker import RECIPE
from recipes.resolved.stage import ResolvedStage
from slurm import starter
from slurm.experiment import Job
from slurm.local_executor import local_executor


def training_job(stage: ResolvedStage) -> Job:
    """Return the job that trains the stage on this machine, once its recipe is recorded."""
    task = training_task(stage)
    guards = [node for node in stage.recipe.trainer.callbacks if hasattr(node, "first_seconds")]
    seconds = max([starter.SECONDS, *(float(guard.first_seconds) for guard in guards)])
    debugged = stage.folder if stage.debug_comm else None
    return Job(stage.name, task, local_executor(stage.layout.world_size, seconds, debugged))


def training_task(stage: ResolvedStage, **checks: Any) -> nemo_run.Partial:
    """Return what a rank of the stage runs; `checks` are those of `slurm.entrypoint.train`.

    A job that is requeued runs the same task, so it evaluates, profiles, alerts and tracks as
    before.
    """
    given: dict[str, Any] = {"config": str(stage.folder / RECIPE)}
    if stage.evaluate_every is not None:
        given["every"] = stage.evaluate_every
    if stage.profile is not None:
        given["profile"] = stage.profile
    if stage.alert:
        given["alert"] = stage.alert
    if stage.track:
        given["track"] = list(stage.track)
    return nemo_run.Partial(train_watched, **given, **checks)
