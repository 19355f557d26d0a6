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
SAVE_SLACK, BESIDE_SAVING = 1.5, 60.0
"""Of the step that a warning falls into, and seconds for ranks to agree and to end."""
WRITE_BYTES_PER_SECOND = 1e9
"""Of a checkpoint, from all nodes together: a file server behind one 10 Gb/s port. Parallel file
systems write faster, and a cluster file that says `save_seconds` knows: a warning that comes too
early costs the rest of the turn, one too late all since the last checkpoint."""
SAVED_BYTES = {"bf16": 14, "fp32": 12}
"""Of a parameter in a checkpoint: the weight, Adam's two moments and, of bf16, the fp32 weight."""
ALLOCATOR = "expandable_segments:True"
"""PYTORCH_CUDA_ALLOC_CONF: a cache of odd sizes would fill the GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Seconds after which something hangs, and those that a job needs to end well."""

    collective: float
    """A collective: ranks wait for each other at most as long as a step takes."""
    first_heartbeat: float
    """From the start of a rank to the end of its first step."""
    heartbeat: float
    """Between the ends of two steps, validation and a checkpoint between them; above `collective`,
    so that a hanging collective is named before the rank that waits in it is ended."""
    stop: float
    """From the warning that a job is about to end to the end of the step it falls into."""
    save: float
    """From that warning to the checkpoint, at a rate of writing that is assumed."""
    allocator: str = ALLOCATOR


def limits(plan: Plan) -> Limits:
    """Return the limits of a plan's job."""
    collective = SLACK * plan.time.step + FIRST_STEP
    stop = SAVE_SLACK * plan.time.step + BESIDE_SAVING
    return Limits(
        collective=collective,
        first_heartbeat=collective + 2 * FIRST_STEP,
        heartbeat=collective + FIRST_STEP,
        stop=stop,
        save=stop + _writing(plan),
    )


def _writing(plan: Plan) -> float:
    """Return the seconds that a checkpoint of the model and its optimizer takes to write."""
    job = plan.job
    size = SAVED_BYTES[job.layout.precision] * job.card.parameters
    return size / WRITE_BYTES_PER_SECOND
