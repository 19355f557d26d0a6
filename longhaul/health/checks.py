# SPDX-License-Identifier: Apache-2.0
"""Checks on the lines of `metrics.jsonl`: pure functions, one per kind of finding; light.

Each takes the newest lines in order and yields what is wrong at the last of them. Every key but
`step` is optional: runs of earlier versions lack some, and CPU ranks have no figures of GPUs.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from longhaul.health.loss_checks import divergence, not_finite, number, spike
from longhaul.health.thresholds import (
    BUSY_SHARE,
    DATA_SHARE,
    DATA_STEPS,
    FEWEST,
    FIRST_STEPS,
    KEPT_LINES,
    MEMORY_BYTES,
    MEMORY_FIRST_STEPS,
    MEMORY_GROWTH,
    MEMORY_LARGEST_RISE,
    MEMORY_PARTS,
    MEMORY_STEPS,
    RECENT,
    SLOW_RANK,
    SLOW_SHARE,
    STALL_SECONDS,
)
from recipes.spec.finding import Finding

Line = Mapping[str, Any]
MiB, GiB = 2**20, 2**30
MEMORY = (
    # The figure, the rank it is of, the keys of other versions, what it is, and what grows in it.
    (
        ("host_private_bytes", "host_memory_bytes"),
        "host_private_rank",
        "host memory",
        "objects that are kept from step to step (lists of tensors, caches of a callback, a reader "
        "of data)",
        "resume from the last checkpoint before the host runs out of it; take out what was added "
        "last, such as callbacks",
    ),
    (
        ("device_allocated_bytes",),
        "device_allocated_rank",
        "GPU memory",
        "tensors that are kept from step to step, such as losses with their graphs",
        "resume from the last checkpoint before the GPU runs out of it; take out what was added "
        "last, such as callbacks",
    ),
)


def findings(lines: Sequence[Line], started: int = 0) -> list[Finding]:
    """Return what is wrong at the last line; `started` is the step that the process began from.

    The loss is compared over a resume; times and memory are those of one process.
    """
    lines = lines[-KEPT_LINES:]
    own = [line for line in lines if line["step"] > started + FIRST_STEPS]
    found = [*not_finite(lines), *spike(lines), *divergence(lines)]
    found += [*straggler(own), *data_starvation(own)]
    found += low_utilization(own, [finding.kind for finding in found])
    settled = [line for line in own if line["step"] > started + MEMORY_FIRST_STEPS]
    found += memory_creep(settled)
    return found


def straggler(lines: Sequence[Line]) -> Iterator[Finding]:
    """Yield each rank, or ranks that share a sequence or layers, that the others wait for."""
    yield from _slow_gpus(lines)
    recent = [line for line in lines[-RECENT:] if isinstance(line.get("slow_ranks"), list)]
    if len(recent) < FEWEST:
        return
    seen: dict[tuple[int, ...], list[tuple[int, float]]] = {}
    for line in recent:
        for slow in line["slow_ranks"]:
            if slow["times_the_others"] >= SLOW_RANK:
                ranks = tuple(slow["ranks"])
                seen.setdefault(ranks, []).append((line["step"], slow["times_the_others"]))
    for ranks, steps in seen.items():
        if len(steps) < SLOW_SHARE * len(recent):
            continue
        named = ", ".join(map(str, ranks))
        several = len(ranks) > 1
        yield Finding(
            kind="straggler",
            step=steps[0][0],
            said=f"{'ranks' if several else 'rank'} {named} {'take' if several else 'takes'} "
            f"{median(times for _, times in steps):.2f} times as long as the others for the same "
            f"work, in {len(steps)} of the last {len(recent)} steps; all ranks wait for "
            f"{'them' if several else 'it'}",
            cause="a throttled or faulty GPU, a busy host, or a slow link inside the node"
            + (
                "; these ranks wait for each other within a step, so one of them is slow"
                if several
                else ""
            ),
            remedy="look at clocks and temperature on its node (nvidia-smi -q -d "
            "PERFORMANCE,TEMPERATURE) and at other processes there; run `longhaul preflight` on "
            "it, and resume without the node if it stays slow",
            ranks=ranks,
        )


def _slow_gpus(lines: Sequence[Line]) -> Iterator[Finding]:
    """Yield each GPU whose kernels are slow by the newest report, an average of some minutes."""
    for slow in (lines[-1].get("slow_gpus") or ()) if lines else ():
        yield Finding(
            kind="straggler",
            step=lines[-1]["step"],
            said=f"the GPU of rank {slow['rank']} on {slow['node']} computes at "
            f"{slow['score']:.0%} of the fastest, or of its own best (times of its kernels)",
            cause="a GPU that is throttled by heat or power, or faulty",
            remedy="look at clocks and temperature on its node (nvidia-smi -q -d "
            "PERFORMANCE,TEMPERATURE); resume without the node if it stays slow",
            ranks=(int(slow["rank"]),),
        )


def waited(line: Line) -> float:
    """Return the seconds that a step waited for data, on the rank that waited longest."""
    found = [number(line, name) for name in ("longest_data_wait_seconds", "data_wait_seconds")]
    known = [seconds for seconds in found if math.isfinite(seconds)]
    return max(known, default=math.nan)


def data_starvation(lines: Sequence[Line]) -> Iterator[Finding]:
    """Yield a finding where the steps wait for their data, again and again or once for long."""
    recent = [
        (line, waited(line), number(line, "seconds"))
        for line in lines[-RECENT:]
        if math.isfinite(waited(line)) and number(line, "seconds") > 0
    ]
    if not recent:
        return
    late = [(line, wait) for line, wait, seconds in recent if wait >= DATA_SHARE * seconds]
    total = sum(seconds for _, _, seconds in recent)
    share = sum(wait for _, wait, _ in recent) / total
    longest = max(wait for _, wait, _ in recent)
    starved = len(recent) >= FEWEST and share >= DATA_SHARE and len(late) >= DATA_STEPS
    if not late or not (starved or longest >= STALL_SECONDS):
        return
    rank = late[-1][0].get("longest_data_wait_rank")
    where = "" if rank is None else f" on rank {rank}"
    yield Finding(
        kind="data_starvation",
        step=late[0][0]["step"],
        said=f"{share:.0%} of the time of the last {len(recent)} steps was spent waiting for data"
        f"{where}, the longest wait {longest:,.1f} s",
        cause="the store's file system is slow or shared with other jobs, or too few workers read",
        remedy="read with more workers (data.num_workers=4), or copy the store to a local disk; "
        "`longhaul preflight` measures the file system",
        ranks=() if rank is None else (int(rank),),
    )


def low_utilization(lines: Sequence[Line], others: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield a finding where the GPUs have nothing to do for most of the time."""
    shares = [
        (line["step"], share) for line in lines[-RECENT:] if (share := _busy(line)) is not None
    ]
    if len(shares) < FEWEST:
        return
    share = median(share for _, share in shares)
    if share >= BUSY_SHARE:
        return
    cause = "steps too short for a GPU, or work on the host between kernels"
    remedy = "`longhaul doctor slow --factory NAME --run RUN` shows where the time of a step goes"
    if "data_starvation" in others:
        cause, remedy = "the GPUs wait for data", "see data_starvation"
    yield Finding(
        kind="low_utilization",
        step=next(step for step, share in shares if share < BUSY_SHARE),
        said=f"the GPUs were busy for {share:.0%} of the time in the last {len(shares)} steps "
        f"(median of their mean; expected {BUSY_SHARE:.0%} or more)",
        cause=cause,
        remedy=remedy,
    )


def _busy(line: Line) -> float | None:
    """Return the share of a step that the GPUs were busy, as a mean; None if it is not known."""
    percent = number(line, "gpu_utilization")
    return percent / 100.0 if math.isfinite(percent) else None


def memory_creep(lines: Sequence[Line]) -> Iterator[Finding]:
    """Yield a finding for memory that grows all along, by more than saves and evaluations do."""
    for keys, of_rank, what, cause, remedy in MEMORY:
        key = next((key for key in keys if lines and math.isfinite(number(lines[-1], key))), None)
        if key is None:
            continue
        used = [
            (line["step"], value)
            for line in lines[-KEPT_LINES // 4 :]
            if math.isfinite(value := number(line, key))
        ]
        each = len(used) // MEMORY_PARTS
        if each < MEMORY_STEPS:
            continue
        used = used[-each * MEMORY_PARTS :]
        least = [
            min(value for _, value in used[part * each : (part + 1) * each])
            for part in range(MEMORY_PARTS)
        ]
        rises = [after - before for before, after in itertools.pairwise(least)]
        growth = least[-1] - least[0]
        if (
            growth < max(MEMORY_BYTES, MEMORY_GROWTH * least[0])
            or min(rises) <= 0
            or max(rises) > MEMORY_LARGEST_RISE * growth
        ):
            continue
        per_step = growth / (each * (MEMORY_PARTS - 1))
        rank = lines[-1].get(of_rank)
        yield Finding(
            kind="memory_creep",
            step=used[0][0],
            said=f"{what}{'' if rank is None else f' of rank {rank}'} grew from "
            f"{least[0] / GiB:.2f} to {least[-1] / GiB:.2f} GiB over {len(used)} steps, "
            f"{per_step / MiB:,.1f} MiB a step, without a pause",
            cause=cause,
            remedy=remedy,
            ranks=() if rank is None else (int(rank),),
        )
