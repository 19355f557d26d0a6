# SPDX-License-Identifier: Apache-2.0
"""The time limits of a stage's job that follow from its plan on a cluster."""

import math
from collections.abc import Sequence

from recipes.planner.timeouts import limits
from recipes.resolved.stage import ResolvedStage
from slurm.cluster_file import LONGEST_SIGNAL, ClusterFile, seconds_of

LEAST_STEPS = 2
"""Steps that a job must have time for besides saving; starting takes about one more."""


def save_seconds(file: ClusterFile, stage: ResolvedStage) -> int:
    """Return how long before its limit a training job is warned, in whole minutes if planned.

    The file's `save_seconds` includes the time of writing; a planned step is waited for anyway.
    """
    said = file.slurm.save_seconds
    if stage.plan is None:
        return said
    waits = limits(stage.plan)
    needed = waits.stop if "save_seconds" in file.slurm.model_fields_set else waits.save
    return said if needed <= said else min(60 * math.ceil(needed / 60), LONGEST_SIGNAL)


def require_time(stages: Sequence[ResolvedStage], file: ClusterFile) -> None:
    """Raise ValueError if the limit of a job is too short for steps and for saving."""
    limit = seconds_of(file.slurm.time)
    for stage in stages:
        if stage.is_done:
            continue
        save, step = save_seconds(file, stage), 0.0 if stage.plan is None else stage.plan.time.step
        needed = save + LEAST_STEPS * step
        if limit <= needed:
            steps = f" and {LEAST_STEPS} steps, {step:,.0f} s each as planned" if step else ""
            raise ValueError(
                f"slurm.time is {file.slurm.time}, {limit:,} s, and {stage.name} needs more "
                f"than {needed:,.0f} s: {save:,} s to save{steps}; raise slurm.time"
            )
