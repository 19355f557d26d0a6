# SPDX-License-Identifier: Apache-2.0
"""What took most of the profiled steps: parts and operators, from the events of PyTorch's profiler.

    summary = summarize(profiler.events(), steps=4)
    summary["parts"][0]["name"], summary["operators"][0]["seconds"]

Seconds are those of all profiled steps. Of a part they are `host_seconds`, while its range was
open, and on a GPU `device_seconds`: those of the kernels that were launched meanwhile, by any
thread, since autograd launches those of a backward from a thread of its own. Parts lie in each
other (attention in forward), and kernels of several streams overlap, so shares do not add up to 1.
Of an operator they are its own, without those that it called: kernels on a GPU, else the host's.

A kernel is launched by a call of CUDA that has its number, whether an operator of PyTorch made the
call or, as Transformer Engine's Adam and what Triton compiles, none. Those of none are listed among
the operators by their own names.

`exposed_communication_seconds`, on a GPU, is the time in which kernels of NCCL ran and no other
did: what an overlap has not hidden.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from torch.autograd.profiler_util import DeviceType  # type: ignore[attr-defined]  # where events have it from

from custom_modules.profiling.step_parts import PREFIX

STEP = "step "
"""Begins the name of the range of a whole step."""
MOST = 20
"""Operators that are listed."""
MICRO = 1e-6
Span = tuple[float, float]
_CALL = re.compile(r"cu(da)?[A-Z]\w*")
"""A call of CUDA's runtime or driver, by the name that CUPTI gives it."""


def summarize(events: Sequence[Any]) -> dict[str, Any]:
    """Return parts and operators by their time; events are torch's `FunctionEvent`s."""
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    on_device = [
        event
        for event in events
        if event.device_type != DeviceType.CPU and not event.is_user_annotation
    ]
    steps = [event for event in on_host if _is_step(event.name)]
    total = sum(event.time_range.elapsed_us() for event in steps) * MICRO
    calls = {event.id: event.time_range.start for event in on_host if _CALL.fullmatch(event.name)}
    launched = sorted(
        (calls[event.id], event.time_range.elapsed_us()) for event in on_device if event.id in calls
    )
    return {
        "profiled_steps": len(steps),
        "seconds": total,
        "exposed_communication_seconds": _exposed(on_device) if on_device else None,
        "parts": _parts(on_host, launched, total, with_device=bool(on_device)),
        "operators": _operators(on_host, on_device, total),
    }


def _is_step(name: str) -> bool:
    return name.startswith(STEP) and name[len(STEP) :].isdecimal()


def _parts(
    events: Iterable[Any], launched: list[tuple[float, float]], total: float, *, with_device: bool
) -> list[dict[str, Any]]:
    starts = [start for start, _ in launched]
    sums = [0.0]
    for _, duration in launched:
        sums.append(sums[-1] + duration)
    rows: dict[str, dict[str, Any]] = {}
    for event in events:
        if not event.name.startswith(PREFIX):
            continue
        name = event.name.removeprefix(PREFIX)
        row = rows.setdefault(
            name,
            {
                "name": name,
                "calls": 0,
                "host_seconds": 0.0,
                "device_seconds": 0.0 if with_device else None,
            },
        )
        row["calls"] += 1
        row["host_seconds"] += event.time_range.elapsed_us() * MICRO
        if with_device:
            first = bisect_left(starts, event.time_range.start)
            last = bisect_left(starts, event.time_range.end)
            row["device_seconds"] += (sums[last] - sums[first]) * MICRO
    which = "device_seconds" if with_device else "host_seconds"
    for row in rows.values():
        row["share"] = row[which] / total if total else 0.0
    return sorted(rows.values(), key=lambda row: -row[which])


def _operators(
    on_host: Iterable[Any], on_device: Sequence[Any], total: float
) -> list[dict[str, Any]]:
    taken: list[tuple[str, float]] = []
    for event in on_host:
        if event.is_user_annotation or event.name.startswith(PREFIX) or _is_step(event.name):
            continue
        if getattr(event, "is_python_function", False):  # with stacks; older torch has none here
            continue
        if on_device and _CALL.fullmatch(event.name):  # torch may give it kernels of an operator
            continue
        of_kernels = sum(kernel.duration for kernel in event.kernels)
        taken.append((event.name, of_kernels if on_device else event.self_cpu_time_total))
    taken += (
        (event.name, event.time_range.elapsed_us())
        for event in on_device
        if getattr(event, "linked_correlation_id", None) == 0
    )
    rows: dict[str, dict[str, Any]] = {}
    for name, own in taken:
        row = rows.setdefault(name, {"name": name, "calls": 0, "seconds": 0.0})
        row["calls"] += 1
        row["seconds"] += own * MICRO
    for row in rows.values():
        row["share"] = row["seconds"] / total if total else 0.0
    return sorted(rows.values(), key=lambda row: -row["seconds"])[:MOST]


def _exposed(kernels: Iterable[Any]) -> float:
    """Return the seconds in which only kernels of NCCL ran."""
    nccl: list[Span] = []
    other: list[Span] = []
    for kernel in kernels:
        spans = nccl if kernel.name.startswith("nccl") else other
        spans.append((kernel.time_range.start, kernel.time_range.end))
    return (_length([*nccl, *other]) - _length(other)) * MICRO


def _length(spans: list[Span]) -> float:
    """Return the length of the union of some spans."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


def table(summary: dict[str, Any]) -> list[str]:
    """Return the lines of a small table: the parts, and the operators that took most."""
    lines = [
        f"profile of {summary['profiled_steps']} steps on rank {summary['rank']}, "
        f"{summary['seconds']:.2f} s"
    ]
    exposed = summary["exposed_communication_seconds"]
    if exposed is not None:
        lines.append(f"  {exposed / summary['seconds']:6.1%}  exposed communication")
    for title, rows in (("part", summary["parts"]), ("operator", summary["operators"][:SHOWN])):
        lines.append(f"   share    calls  {title}")
        lines += [f"  {row['share']:6.1%}  {row['calls']:7,}  {row['name']}" for row in rows]
    return lines


SHOWN = 8
"""Operators in the table of the log."""
