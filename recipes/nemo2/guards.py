# SPDX-License-Identifier: Apache-2.0
"""Callbacks that stop a run before its time limit, when it hangs and when it diverges."""

import math

import nemo_run as run

from custom_modules.callbacks.collective_timeout import CollectiveTimeout
from custom_modules.callbacks.hang_guard import HangGuard
from custom_modules.callbacks.loss_guard import LossGuard
from custom_modules.callbacks.stop_in_time import StopInTime
from custom_modules.callbacks.stragglers import Stragglers
from recipes.planner.plan import Plan
from recipes.planner.timeouts import limits
from recipes.spec.stage import Stage

ON_CPU = {"first_seconds": 7200, "seconds": 3600}
"""Timeouts of CPU ranks, whose steps are not planned."""


def guards(stage: Stage, planned: Plan | None) -> list[run.Config]:
    """Return the callbacks against the time limit, hangs and a diverging loss.

    `planned` is the stage's plan on GPUs, None for CPU ranks.
    """
    found = [
        run.Config(StopInTime),
        run.Config(LossGuard, path="", warmup_steps=stage.lr.warmup_steps(stage.steps)),
    ]
    if planned is None:
        return [*found, run.Config(HangGuard, folder="", **ON_CPU)]
    waits = limits(planned)
    first, between = _minutes(waits.first_heartbeat), _minutes(waits.heartbeat)
    return [
        *found,
        run.Config(HangGuard, folder="", first_seconds=first, seconds=between),
        run.Config(CollectiveTimeout, seconds=_minutes(waits.collective)),
        run.Config(Stragglers),
    ]


def _minutes(seconds: float) -> int:
    """Return seconds, rounded up to whole ten minutes."""
    return math.ceil(seconds / 600) * 600
