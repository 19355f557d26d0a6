# SPDX-License-Identifier: Apache-2.0
"""The plan of a stage on a cluster, and the time limits of its job that follow from it.

The layout is read back from the resolved recipe, so that the command line's overrides count.
"""

import math
from collections.abc import Sequence

import nemo_run

from longhaul.jobs import local_chain
from longhaul.jobs.ladder_run import Plan as Run
from recipes.planner.plan import Plan
from recipes.planner.search import Question
from recipes.planner.timeouts import limits
from recipes.resolved import read
from recipes.resolved.read import layout_of, tokens_per_batch
from slurm.cluster_file import LONGEST_SIGNAL, ClusterFile, seconds_of

LEAST_STEPS = 2
"""Steps that a job must have time for besides saving; starting takes about one more."""


def planned(run: Run, recipe: nemo_run.Partial, file: ClusterFile) -> Plan | None:
    """Return the plan of a stage on a cluster; None for CPU ranks or without stated hardware."""
    if read.device_of(recipe) == "cpu" or file.hardware is None:
        return None
    layout = layout_of(recipe)
    return Question(
        card=run.card,
        seq_length=int(recipe.data.seq_length),
        tokens_per_batch=tokens_per_batch(recipe),
        cluster=file.hardware,
        gpus=layout.world_size,
        fp8=layout.fp8,
    ).plan(layout)


def save_seconds(file: ClusterFile, found: Plan | None) -> int:
    """Return how long before its limit a training job is warned, in whole minutes if planned.

    The file's `save_seconds` includes the time of writing; a planned step is waited for anyway.
    """
    said = file.slurm.save_seconds
    if found is None:
        return said
    waits = limits(found)
    needed = waits.stop if "save_seconds" in file.slurm.model_fields_set else waits.save
    return said if needed <= said else min(60 * math.ceil(needed / 60), LONGEST_SIGNAL)


def require_time(run: Run, made: Sequence[nemo_run.Partial], file: ClusterFile) -> None:
    """Raise ValueError if the limit of a job is too short for steps and for saving."""
    limit = seconds_of(file.slurm.time)
    for recipe in made:
        if local_chain.is_done(recipe):
            continue
        found = planned(run, recipe, file)
        save, step = save_seconds(file, found), 0.0 if found is None else found.time.step
        needed = save + LEAST_STEPS * step
        if limit <= needed:
            steps = f" and {LEAST_STEPS} steps, {step:,.0f} s each as planned" if step else ""
            raise ValueError(
                f"slurm.time is {file.slurm.time}, {limit:,} s, and {recipe.log.name} needs more "
                f"than {needed:,.0f} s: {save:,} s to save{steps}; raise slurm.time"
            )
