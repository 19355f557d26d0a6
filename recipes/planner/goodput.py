# SPDX-License-Identifier: Apache-2.0
"""Wall time of a stage on nodes that fail, and the checkpoint interval that makes it shortest.

Failures are independent and equally likely at any moment. A job loses the work since its last
complete checkpoint, waits until the failure is detected and the job is queued again, starts, and
loads that checkpoint; it may fail while it does. With rate `r` of failures of the job, the expected
time of `n` steps of `t` seconds and a checkpoint that blocks for `b` is

    exp(r R) (1 / r + D) (exp(r (n t + b)) - 1)

(Daly 2006, doi 10.1016/j.future.2004.11.016; Bougeret et al. 2011, doi 10.1145/2063384.2063428): D
is the time until the job starts again, R the time of starting and loading. A checkpoint written
behind training can be used only once it is complete; a failure loses as much work more as is done
meanwhile, which is part of R here. The interval that costs least is near `sqrt(2 b / r)` (Young
1974, doi 10.1145/361147.361115), in whole steps.
"""

import math
from dataclasses import dataclass

from recipes.planner.plan import Plan
from recipes.planner.timeouts import limits, saved_bytes

COPY_OVERHEAD = 5.0
"""Seconds that training waits for a checkpoint besides the copy to the host: plan, fork, barrier.
An assumption, not measured on GPUs here."""
CRASH_SECONDS = 30.0
"""Until the scheduler has ended a job one of whose ranks has died."""
HANGS = 7 / 419
"""Share of failures that only a timeout detects (Llama 3 405B, arXiv 2407.21783, table 5)."""
LEAST_CHECKPOINTS, CHEAP = 4, 0.01
"""A stage has at least so many checkpoints, as far as they take at most that share of its time."""
SYNCHRONOUS = ("gradients", "parameters")
"""Kinds of sharding, Megatron FSDP's, whose checkpoints are written while training waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """What a job loses by saving and by failures. All times in seconds."""

    between: float
    """Mean time between failures of the job."""
    blocked: float
    """Training waits so long for each checkpoint."""
    behind: float
    """After which a checkpoint is complete; training goes on meanwhile."""
    down: float
    """From a failure to the start of the ranks: detection and queue."""
    restart: float
    """From there to training again: start, and loading the checkpoint."""

    def expected(self, trained: float) -> float:
        """Return the expected time of `trained` seconds of steps and the checkpoint after them.

        Infinite if it is too large for a float.
        """
        rate = 1 / self.between
        try:
            again = math.exp(rate * (self.restart + self.behind)) * (self.between + self.down)
            return again * math.expm1(rate * (trained + self.blocked))
        except OverflowError:
            return math.inf

    def best_interval(self) -> float:
        """Return the seconds of steps between checkpoints with the least expected time.

        It is the root of `x / M exp(y) = exp(y) - 1` with `y = (x + blocked) / M`, M the mean time
        between failures; Young's and Daly's formulas approximate it.
        """
        low, high = 0.0, self.between
        for _ in range(80):
            middle = (low + high) / 2
            scaled = middle / self.between
            if scaled + math.expm1(-(middle + self.blocked) / self.between) < 0:
                low = middle
            else:
                high = middle
        return high


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """The checkpoint interval of a stage, and the wall time that it leads to."""

    every: int
    """Steps between checkpoints."""
    interval: float
    """Seconds between checkpoints."""
    saved_bytes: float
    """Size of a checkpoint."""
    share: float
    """Share of the wall time that trains; the rest is saving, waiting, starting and lost work."""
    failures: Failures


def failures(plan: Plan) -> Failures:
    """Return what a plan's job loses by saving and by failures on its cluster."""
    machines, layout = plan.cluster, plan.workload.layout
    known, size = machines.reliability, saved_bytes(plan)
    nodes = math.ceil(plan.gpus / machines.gpus_per_node)
    moved = size / known.bytes_per_second(nodes)
    copied = COPY_OVERHEAD + size / plan.gpus / (machines.host_link_gbps * 1e9)
    waits = layout.sharding in SYNCHRONOUS
    return Failures(
        between=known.node_mtbf_hours * 3600 / nodes,
        blocked=COPY_OVERHEAD + moved if waits else copied,
        behind=0.0 if waits else moved,
        down=(1 - HANGS) * CRASH_SECONDS + HANGS * limits(plan).collective + known.requeue_seconds,
        restart=known.start_seconds + moved,
    )


def goodput(plan: Plan, steps: int) -> Goodput:
    """Return the best checkpoint interval of a stage of so many steps, and what it leads to.

    A checkpoint begins only after the one before is complete. However safe a stage is, it has four
    checkpoints, or as many as take a hundredth of its time.
    """
    lost, step = failures(plan), plan.time.step
    cheap = int(CHEAP * steps * step / lost.blocked)
    most = max(1, steps // min(max(1, cheap), LEAST_CHECKPOINTS))
    least = max(1, math.ceil(lost.behind / step))
    best = lost.best_interval() / step
    near = {min(most, max(least, round_to(best))) for round_to in (math.floor, math.ceil)}
    every = min(near, key=lambda each: lost.expected(each * step) / each)
    return Goodput(
        every=every,
        interval=every * step,
        saved_bytes=saved_bytes(plan),
        share=every * step / lost.expected(every * step),
        failures=lost,
    )
