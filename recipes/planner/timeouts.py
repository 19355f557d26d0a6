# SPDX-License-Identifier: Apache-2.0
"""Timeouts of a job, derived from its planned step time.

A fixed default does not fit: PyTorch's watchdog ends a job after a collective of 10 minutes, which
the first step of a long stage exceeds (kernels compile, data is opened, and a step may take an
hour), and a limit of days would never detect a hung rank.
"""

from dataclasses import dataclass

from recipes.planner.plan import Plan

FIRST_STEP, SLACK = 900.0, 3.0
"""Seconds added to a step for one-time work, and the factor by which planned times may be off."""
SAVE_SLACK, BESIDE_SAVING = 1.5, 60.0
"""Multiple of the step that a warning arrives in, and seconds for ranks to agree and exit."""
SAVED_BYTES = {"bf16": 14, "fp32": 12}
"""Bytes per parameter in a checkpoint: weight, Adam's two moments and, for bf16, fp32 weight."""
ALLOCATOR = "expandable_segments:True"
"""PYTORCH_CUDA_ALLOC_CONF: a cache of odd sizes would fill the GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Seconds after which a rank counts as hung, and seconds that a job needs to end in order."""

    collective: float
    """Timeout of a collective: ranks wait for each other at most as long as a step takes."""
    first_heartbeat: float
    """From the start of a rank to the end of its first step."""
    heartbeat: float
    """Between the ends of two steps, including validation and a checkpoint; above `collective`, so
    that a hung collective is reported before the rank that waits in it is ended."""
    stop: float
    """From the warning that a job is about to end to the end of the current step."""
    save: float
    """From that warning to the end of the checkpoint, at the cluster file's write rate."""
    allocator: str = ALLOCATOR


def limits(plan: Plan) -> Limits:
    """Return the limits of the job of a plan."""
    collective = SLACK * plan.time.step + FIRST_STEP
    stop = SAVE_SLACK * plan.time.step + BESIDE_SAVING
    return Limits(
        collective=collective,
        first_heartbeat=collective + 2 * FIRST_STEP,
        heartbeat=collective + FIRST_STEP,
        stop=stop,
        save=stop + _writing(plan),
    )


def saved_bytes(plan: Plan) -> float:
    """Return the size of a checkpoint of the model and its optimizer."""
    workload = plan.workload
    return SAVED_BYTES[workload.layout.precision] * workload.card.parameters


def _writing(plan: Plan) -> float:
    """Return the seconds to write a checkpoint, at the rate of the cluster file or 1 GB/s.

    A warning that comes too early costs the rest of the job's time, one too late all progress since
    the last checkpoint; a cluster file can also state `save_seconds`.
    """
    return saved_bytes(plan) / plan.cluster.reliability.bytes_per_second(nodes=1)
