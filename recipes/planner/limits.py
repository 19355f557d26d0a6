# SPDX-License-Identifier: Apache-2.0
"""The waiting times of a job, from its planned step: what a fixed default gets wrong.

PyTorch's watchdog ends a job whose collective waits for 10 minutes, which the first step of a long
stage does (kernels compile, data is opened, and a step alone may take an hour); a limit of days
would never find a rank that hangs.
"""

from dataclasses import dataclass

from recipes.planner.plan import Plan

FIRST_STEP, SLACK = 900.0, 3.0
"""Seconds on top of a step, for what happens once; planned times may be off by as much."""
ALLOCATOR = "expandable_segments:True"
"""PYTORCH_CUDA_ALLOC_CONF: a cache of odd sizes would fill the GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Seconds after which something hangs."""

    collective: float
    """A collective: ranks wait for each other at most as long as a step takes."""
    first_heartbeat: float
    """From the start of a rank to the end of its first step."""
    heartbeat: float
    """Between the ends of two steps, validation and a checkpoint between them; above `collective`,
    so that a hanging collective is named before the rank that waits in it is ended."""
    allocator: str = ALLOCATOR


def limits(plan: Plan) -> Limits:
    """Return the limits of a plan's job."""
    collective = SLACK * plan.time.step + FIRST_STEP
    return Limits(
        collective=collective,
        first_heartbeat=collective + 2 * FIRST_STEP,
        heartbeat=collective + FIRST_STEP,
    )
