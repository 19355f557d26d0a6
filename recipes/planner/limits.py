# SPDX-License-Identifier: Apache-2.0
"""The waiting times of a job, from its planned step: what a fixed default gets wrong.

PyTorch's watchdog ends a job whose collective waits for 10 minutes, which the first step of a long
stage does (kernels compile, data is opened, and a step alone may take an hour); a limit of days
would never find a rank that hangs.
"""

from dataclasses import dataclass

from recipes.planner.plan import Plan

LEAST_TIMEOUT, FIRST_STEP, SLACK = 600.0, 900.0, 3.0
"""Seconds; seconds on top of the first step; planned times may be off by as much."""
ALLOCATOR = "expandable_segments:True"
"""PYTORCH_CUDA_ALLOC_CONF: a cache of odd sizes would fill the GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Seconds after which something hangs."""

    collective: float
    """A collective: ranks wait for each other at most as long as a step takes."""
    first_heartbeat: float
    """From the start to the first step's end."""
    heartbeat: float
    """Between two steps."""
    allocator: str = ALLOCATOR


def limits(plan: Plan) -> Limits:
    """Return the limits of a plan's job."""
    step = plan.time.step
    return Limits(
        collective=max(LEAST_TIMEOUT, SLACK * step + FIRST_STEP),
        first_heartbeat=max(LEAST_TIMEOUT, SLACK * step + 2 * FIRST_STEP),
        heartbeat=max(LEAST_TIMEOUT, SLACK * step),
    )
