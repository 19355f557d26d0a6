# SPDX-License-Identifier: Apache-2.0
"""The reserve, and the buffers of unknown kernels, that measured peaks show.

A step's measured bytes are those of the formulas, F, and two constants, times noise:

    tensors_k = F_k + u x_k + e_k           process_k = F_k + u x_k + r + e'_k

with x_k the bytes of a layer's input, u the buffers of unknown kernels in such inputs, and r the
reserve. Both have a prior, normal around their values before, which keeps what the measurements say
nothing about: steps of one length do not tell u from r where only the process's bytes are known.
The most probable pair solves a linear system. The error is that of leaving one step out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from recipes.planner.kernels import kernels_on
from recipes.planner.memory import input_bytes, memory
from recipes.planner.workload import Workload
from recipes.spec.cluster import Cluster
from recipes.spec.memory_constants import MemoryConstants
from recipes.spec.units import GiB

PRIOR_RESERVE_GIB, PRIOR_INPUTS, NOISE = 2.0, 8.0, 0.01
"""Deviations of the two constants before anything is measured, and of a measurement, relative."""
LEAST_ERROR, OF_ONE = 0.02, 0.07
"""Least error that is claimed, and the error claimed where nothing can be left out."""
CONTRADICTION = 0.1
"""Difference of the bytes of one workload, relative, from which they contradict each other."""
STATE = ("weights", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredBytes:
    """Peak bytes of the fullest rank of a step."""

    name: str
    """Where they were measured."""
    workload: Workload
    process: float
    """All that the process took on its GPU."""
    tensors: float | None = None
    """What the allocator gave to tensors; None if not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedBytes:
    """Constants fitted to measured bytes."""

    constants: MemoryConstants
    before: tuple[float, ...]
    """Bytes predicted for each step with the constants before."""
    after: tuple[float, ...]
    left_out: tuple[float, ...]
    """Bytes predicted for each step by the others; empty for a single one."""


def calibrated_bytes(steps: Sequence[MeasuredBytes], cluster: Cluster) -> CalibratedBytes:
    """Return the constants that explain the measured bytes on a cluster.

    Raises ValueError for no bytes, for more than the GPU has or less than a model's state takes,
    and for steps of one workload whose bytes contradict each other.
    """
    _require_sound(steps, cluster)
    fitted = _fit(steps, cluster)
    left_out = tuple(
        _predicted(step, cluster, _fit([*steps[:place], *steps[place + 1 :]], cluster))
        for place, step in enumerate(steps)
        if len(steps) > 1
    )
    error = OF_ONE
    if left_out:
        wrong = [found / step.process - 1 for found, step in zip(left_out, steps, strict=True)]
        error = max(LEAST_ERROR, math.sqrt(sum(one**2 for one in wrong) / len(wrong)))
    fitted = replace(fitted, error=float(f"{error:.2g}"))
    return CalibratedBytes(
        constants=fitted,
        before=tuple(_predicted(step, cluster, cluster.memory) for step in steps),
        after=tuple(_predicted(step, cluster, fitted) for step in steps),
        left_out=left_out,
    )


def _require_sound(steps: Sequence[MeasuredBytes], cluster: Cluster) -> None:
    if not steps:
        raise ValueError("there is no measured peak of memory to calibrate with")
    for step in steps:
        if step.process > cluster.gpu_bytes:
            raise ValueError(
                f"{step.name}: a peak of {step.process / GiB:,.1f} GiB is more than the "
                f"{cluster.gpu.memory_gib:g} GiB of {cluster.gpu.name}; name the cluster that ran"
            )
        categories = memory(step.workload).categories
        state = sum(categories[name] for name in STATE)
        if step.process < state:
            raise ValueError(
                f"{step.name}: a peak of {step.process / GiB:,.1f} GiB is less than weights, "
                f"gradients and optimizer take, {state / GiB:,.1f} GiB; name the card and the "
                "layout that ran"
            )
        for other in steps:
            if other.workload != step.workload:
                continue
            if abs(step.process / other.process - 1) > CONTRADICTION:
                raise ValueError(
                    f"{step.name} and {other.name} contradict each other: the same workload takes "
                    f"{step.process / GiB:,.1f} and {other.process / GiB:,.1f} GiB; leave out the "
                    "one whose GPU was shared"
                )


def _fit(steps: Sequence[MeasuredBytes], cluster: Cluster) -> MemoryConstants:
    """Return the most probable constants."""
    before = cluster.memory
    inputs = [input_bytes(step.workload) for step in steps]
    rows = [[1 / (PRIOR_RESERVE_GIB * GiB), 0.0], [0.0, 1 / PRIOR_INPUTS]]
    right = [before.reserve_gib / PRIOR_RESERVE_GIB, before.unknown_inputs / PRIOR_INPUTS]
    nothing = MemoryConstants(reserve_gib=0)
    for step, x in zip(steps, inputs, strict=True):
        of_formulas, noise = _predicted(step, cluster, nothing), NOISE * step.process
        rows.append([1 / noise, x / noise])
        right.append((step.process - of_formulas) / noise)
        if step.tensors is not None:
            rows.append([0.0, x / noise])
            right.append((step.tensors - of_formulas) / noise)
    scale = np.array([GiB, 1.0])  # the columns in units of about one
    (reserve, unknown), *_ = np.linalg.lstsq(np.array(rows) * scale, np.array(right), rcond=None)
    return MemoryConstants(
        reserve_gib=float(f"{max(0.0, reserve):.4g}"), unknown_inputs=float(f"{unknown:.4g}")
    )


def _predicted(step: MeasuredBytes, cluster: Cluster, constants: MemoryConstants) -> float:
    return memory(step.workload, kernels_on(replace(cluster, memory=constants))).total
