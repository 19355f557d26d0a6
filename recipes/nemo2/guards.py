# SPDX-License-Identifier: Apache-2.0
"""Callbacks that stop a run before its time limit, when it hangs and when it diverges."""

import math

import nemo_run as run

from custom_modules.callbacks.collective_timeout import CollectiveTimeout
from custom_modules.callbacks.hang_guard import HangGuard
from custom_modules.callbacks.loss_guard import LossGuard
from custom_modules.callbacks.stop_in_time import StopInTime
from custom_modules.callbacks.stragglers import Stragglers
from recipes.planner.search.request import of_stage
from recipes.planner.timeouts import limits
from recipes.spec import cluster
from recipes.spec.cluster import Cluster
from recipes.spec.layout import Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.stage import Stage

ON_CPU = {"first_seconds": 7200, "seconds": 3600}
"""Timeouts of CPU ranks, whose steps are not planned."""


def guards(
    card: ModelCard, stage: Stage, layout: Layout, machines: Cluster | None
) -> list[run.Config]:
    """Return the callbacks against the time limit, hangs and a diverging loss."""
    found = [
        run.Config(StopInTime),
        run.Config(LossGuard, path="", warmup_steps=stage.lr.warmup_steps(stage.steps)),
    ]
    if layout.device == "cpu":
        return [*found, run.Config(HangGuard, folder="", **ON_CPU)]
    machines = machines or cluster.load("dgx_h100")
    asked = of_stage(card, stage, machines, gpus=layout.world_size, fp8=layout.fp8)
    waits = limits(asked.plan(layout))
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
