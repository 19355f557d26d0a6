# SPDX-License-Identifier: Apache-2.0
"""Shares of peak rates that measured steps show, with the error of predictions made with them.

A measured step time is the planner's, times noise:

    log T_k = log time(workload_k, shares) + e_k,    shares_j = before_j exp(t_j)

Few steps don't determine all shares: those of ring and matrix products look alike in one length.
So each `t_j` has a prior, normal around 0 with the deviation below, which keeps the share that a
measurement says nothing about. The most probable `t` is found by Gauss-Newton's method.

The error is that of leaving one out: the shares are fitted to all measurements but one, which is
then predicted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from recipes.planner.time import time
from recipes.planner.workload import Workload
from recipes.spec.cluster import Cluster
from recipes.spec.efficiency import Efficiency

SHARES = {
    "matmul": ("matmul", "matmul_fp8", "experts"),
    "attention": ("attention_forward", "attention_backward"),
    "memory": ("memory",),
    "nvlink": ("nvlink",),
    "network": ("network",),
    "host": ("layer_seconds",),
}
"""Constants that are scaled together."""
UNSURE = {"host": 2.0}
"""Deviation of the logarithm of a constant before anything is measured; of all others `PRIOR`."""
PRIOR, NOISE = 0.3, 0.03
"""Deviations of the logarithm of a share, and of a measured time."""
LEAST_ERROR, OF_ONE = 0.05, 0.15
"""Least error that is claimed, and the error claimed where nothing can be left out."""
CONTRADICTION = 0.25
"""Difference of the times of one workload, relative, from which they contradict each other."""
ROUNDS, STEP = 40, 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """A step that was timed."""

    name: str
    """Where it was measured."""
    workload: Workload
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibrated:
    """Shares fitted to measured steps."""

    efficiency: Efficiency
    before: tuple[float, ...]
    """Seconds predicted for each step with the shares before."""
    after: tuple[float, ...]
    left_out: tuple[float, ...]
    """Seconds predicted for each step by the others; empty for a single one."""


def calibrated(steps: Sequence[MeasuredStep], cluster: Cluster) -> Calibrated:
    """Return the shares that explain the measured steps on a cluster.

    Raises ValueError for no steps, for a step that is faster than the GPU's peak, and for steps of
    one workload whose times contradict each other.
    """
    _require_sound(steps, cluster)
    fitted = _fit(steps, cluster)
    left_out = []
    for place, step in enumerate(steps):
        others = [*steps[:place], *steps[place + 1 :]]
        if others:
            left_out.append(_seconds(step, cluster, _fit(others, cluster)))
    error = LEAST_ERROR
    if left_out:
        wrong = [
            math.log(found / step.seconds) for found, step in zip(left_out, steps, strict=True)
        ]
        error = max(error, math.sqrt(sum(one**2 for one in wrong) / len(wrong)))
    else:
        error = OF_ONE
    fitted = replace(fitted, time_error=float(f"{error:.2g}"))
    return Calibrated(
        efficiency=fitted,
        before=tuple(_seconds(step, cluster, cluster.efficiency) for step in steps),
        after=tuple(_seconds(step, cluster, fitted) for step in steps),
        left_out=tuple(left_out),
    )


def _require_sound(steps: Sequence[MeasuredStep], cluster: Cluster) -> None:
    if not steps:
        raise ValueError("there is no measured step to calibrate with")
    for step in steps:
        workload = step.workload
        flops = workload.card.flops_per_token(workload.seq_length) * workload.tokens_per_batch
        peak = cluster.gpu.fp8_tflops if workload.layout.fp8.recipe != "none" else 0.0
        peak = max(peak, cluster.gpu.bf16_tflops) * 1e12
        reached = flops / step.seconds / workload.layout.world_size / peak
        if reached > 1:
            raise ValueError(
                f"{step.name}: a step of {step.seconds:,.3g} s would take {reached:.0%} of the "
                f"peak of {cluster.gpu.name}; name the cluster, the layout and the tokens per "
                "batch that ran"
            )
        for other in steps:
            if other.workload != workload:
                continue
            if abs(math.log(step.seconds / other.seconds)) > CONTRADICTION:
                raise ValueError(
                    f"{step.name} and {other.name} contradict each other: the same workload takes "
                    f"{step.seconds:,.3g} s and {other.seconds:,.3g} s; leave the disturbed one out"
                )


def _fit(steps: Sequence[MeasuredStep], cluster: Cluster) -> Efficiency:
    """Return the most probable shares."""
    names = [name for name in SHARES if getattr(cluster.efficiency, SHARES[name][0])]
    prior = np.array([UNSURE.get(name, PRIOR) for name in names])

    def residuals(found: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        shares = _scaled(cluster.efficiency, names, found)
        wrong = [math.log(_seconds(step, cluster, shares) / step.seconds) for step in steps]
        return np.array([*(one / NOISE for one in wrong), *(found / prior)])

    found = np.zeros(len(names))
    now, damping = residuals(found), 1e-3
    for _ in range(ROUNDS):
        slopes = np.stack(
            [
                (residuals(found + STEP * one) - residuals(found - STEP * one)) / (2 * STEP)
                for one in np.eye(len(names))
            ],
            axis=1,
        )
        square = slopes.T @ slopes
        move = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slopes.T @ now)
        tried = residuals(found + move)
        if tried @ tried < now @ now:
            found, now, damping = found + move, tried, damping / 4
        else:
            damping *= 8
        if np.abs(move).max() < 1e-6:
            break
    return _scaled(cluster.efficiency, names, found)


def _scaled(
    before: Efficiency, names: Sequence[str], logarithms: npt.NDArray[np.float64]
) -> Efficiency:
    changed: dict[str, Any] = {
        constant: float(f"{getattr(before, constant) * math.exp(logarithm):.6g}")
        for name, logarithm in zip(names, logarithms, strict=True)
        for constant in SHARES[name]
    }
    return replace(before, **changed)


def _seconds(step: MeasuredStep, cluster: Cluster, shares: Efficiency) -> float:
    return time(step.workload, replace(cluster, efficiency=shares)).step
