# SPDX-License-Identifier: Apache-2.0
"""Ranges of predicted figures: by the calibration of the cluster file, or as published runs had.

Without a calibration a range is that of published figures that nothing was fitted to, measured over
predicted (`benchmarks.planner_published`): rates by the attention kernel that each names, but for
torchtitan's on GPUs of 500 W, which are slower than the range, and bytes. The range of models with
experts is wide: the same layout of one model differed by 1.8 times between two releases of
Megatron-Bridge.
"""

from recipes.planner.plan import Plan

RATES, BYTES = (0.87, 1.34), (0.93, 1.09)
"""Lowest and highest measured over predicted tokens/s and bytes of a GPU."""
RATES_OF_EXPERTS = (0.64, 2.04)
"""The same of models with experts: one model, without and with DeepEP, in FP8."""


def is_calibrated(plan: Plan) -> bool:
    """Return whether the shares of the cluster file were fitted to measured steps."""
    return plan.cluster.efficiency.time_error > 0


def has_calibrated_bytes(plan: Plan) -> bool:
    """Return whether the memory constants of the cluster file were fitted to measured peaks."""
    return plan.cluster.memory.error > 0


def rate_range(plan: Plan) -> tuple[float, float]:
    """Return the lowest and highest tokens/s of a GPU to expect."""
    rate, error = plan.time.tokens_per_gpu_second, plan.cluster.efficiency.time_error
    if error:
        return rate / (1 + error), rate * (1 + error)
    lowest, highest = RATES_OF_EXPERTS if plan.workload.card.facts.experts else RATES
    return lowest * rate, highest * rate


def bytes_range(plan: Plan) -> tuple[float, float]:
    """Return the lowest and highest bytes of a GPU to expect."""
    total, error = plan.memory.total, plan.cluster.memory.error
    if error:
        return total * (1 - error), total * (1 + error)
    return BYTES[0] * total, BYTES[1] * total
