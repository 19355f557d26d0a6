# SPDX-License-Identifier: Apache-2.0
"""Sentences of a plan's page: its rate and range, attention within documents, nodes that fail."""

from recipes.planner.accuracy import (
    bytes_range,
    has_calibrated_bytes,
    is_calibrated,
    rate_range,
)
from recipes.planner.goodput import Goodput, goodput
from recipes.planner.plan import Plan
from recipes.planner.serving import serving
from recipes.spec.naming import amount, counted
from recipes.spec.units import GiB


def figures(plan: Plan, budget: int, *, default_budget: bool) -> str:
    """Return the rate, the MFU, and what a budget takes and costs."""
    hours = plan.gpu_hours(budget)
    price = plan.cost(budget)
    said = " (--tokens sets it)" if default_budget else ""
    unit = f" {plan.cluster.currency}".rstrip()
    rate = f"{plan.cluster.price_per_gpu_hour:g}{unit} per GPU-hour"
    paid = f", cost {price:,.0f}{unit} at the cluster file's {rate}" if price else ""
    return (
        f"{plan.time.tokens_per_gpu_second:,.0f} tokens/s/GPU, causal MFU {plan.time.mfu:.1%}; "
        f"{amount(budget)} tokens{said}: {hours:,.0f} GPU-hours, "
        f"{hours / plan.gpus / 24:,.2f} days{paid}"
    )


def attention(plan: Plan) -> str:
    """Return a sentence on the attention kernel that is counted on, and its rates."""
    found, size = plan.cluster.efficiency, plan.workload.card.head_dim
    forward, backward = found.attention_of(size)
    return (
        f"attention kernel: {found.attention_kernel}, {forward:.0%} of the peak forward and "
        f"{backward:.0%} backward with heads of {size}"
    )


def documents(plan: Plan) -> str:
    """Return a sentence on attention within documents, and the wait for the longest."""
    found, attention = plan.time.attended, plan.time.categories["attention"]
    waiting = plan.time.categories["waiting"]
    said = f"within documents attention takes {found.mean:.1%} of its time over whole sequences"
    if not waiting:
        return said
    return (
        f"{said}, {attention:,.2f} s; ranks wait {waiting:,.2f} s for the one with the longest "
        "documents"
    )


def ranges(plan: Plan) -> str:
    """Return a sentence on how far the rate and the memory may be off."""
    (slow, fast), (least, most) = rate_range(plan), bytes_range(plan)
    size, rate = f"{least / GiB:.1f} to {most / GiB:.1f} GiB", f"{slow:,.0f} to {fast:,.0f}"
    by = ("by the calibration", "as published runs had")
    of_rate, of_size = by[not is_calibrated(plan)], by[not has_calibrated_bytes(plan)]
    said = f"expect {rate} tokens/s/GPU and {size}, {of_rate}"
    if of_rate != of_size:
        said = f"expect {rate} tokens/s/GPU, {of_rate}, and {size}, {of_size}"
    if is_calibrated(plan):
        return said
    return f"{said}; `longhaul calibrate` fits the planner to yours"


def with_failures(plan: Plan, budget: int) -> str:
    """Return a sentence on the wall time of a budget on nodes that fail."""
    found = goodput_of(plan, budget)
    hours = plan.gpu_hours(budget) / found.share
    every = counted(found.every, "step")
    return (
        f"with failures: {found.share:.1%} of the time trains, {hours:,.0f} GPU-hours, "
        f"{hours / plan.gpus / 24:,.2f} days; a failure every "
        f"{_span(found.failures.between)}, a checkpoint of {found.saved_bytes / 1e9:,.0f} GB every "
        f"{every} ({_span(found.interval)})"
    )


def served(plan: Plan) -> str:
    """Return a sentence on the KV cache of the plan's length, and how many its GPUs hold."""
    found = serving(plan)
    bf16, fp8 = (f"{size / GiB:,.2f} GiB" for size in found.kv_cache_bytes.values())
    of_bf16, of_fp8 = (f"{number:,}" for number in found.sequences.values())
    said = f"serving: a sequence has a KV cache of {bf16} in bf16 or {fp8} in FP8"
    if not found.pipeline:
        return f"{said}; these GPUs do not hold the bf16 weights"
    over = f"TP {found.tensor_parallel}"
    if found.pipeline > 1:
        over += f", PP {found.pipeline}"
    return f"{said}; next to bf16 weights ({over}) these GPUs hold {of_bf16} or {of_fp8} of them"


def goodput_of(plan: Plan, budget: int) -> Goodput:
    """Return the share of the wall time that trains while a budget lasts."""
    return goodput(plan, max(1, round(budget / plan.workload.tokens_per_batch)))


def _span(seconds: float) -> str:
    """Return a time in the largest unit that it has two of."""
    units = (("days", 86_400), ("hours", 3_600), ("minutes", 60))
    for name, unit in units:
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:,.0f} s"
