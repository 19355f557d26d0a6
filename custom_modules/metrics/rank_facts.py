# SPDX-License-Identifier: Apache-2.0
"""The numbers of each rank at a step, gathered by one collective.

A rank has a vector of float64: its facts, the samples that it has received, and its sums of losses.
Integers up to 2^53 are exact. NaN stands for what a rank does not know.
"""

import math
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MEMORY = ("peak_memory_bytes", "device_memory_bytes", "reserved_memory_bytes", "host_memory_bytes")
MOST_LISTED = 64
"""Ranks up to which a line has the number of each."""


@dataclass(frozen=True)
class Gathered:
    """The vectors [ranks, width] of all ranks, on CPU."""

    names: tuple[str, ...]
    samples: Tensor
    """Samples [ranks, n] that each has received, -1 where there were fewer."""
    sums: Tensor
    """Sums [width] of losses over all ranks."""
    table: Tensor

    def of(self, name: str) -> list[float]:
        """Return a fact of each rank."""
        values: list[float] = self.table[:, self.names.index(name)].tolist()
        return values

    def known(self, name: str) -> list[float]:
        """Return a fact of the ranks that know it."""
        return [value for value in self.of(name) if not math.isnan(value)]


def gather(facts: Mapping[str, float], samples: Sequence[int], sums: Tensor) -> Gathered:
    """Return the facts of all ranks of the world; each has the same names and as many samples."""
    device = torch.cuda.current_device()
    values = torch.tensor([*facts.values(), *samples], dtype=torch.float64, device=device)
    mine = torch.cat([values, sums.to(values)])
    everyone = mine.new_empty(dist.get_world_size(), mine.numel())
    dist.all_gather(list(everyone), mine)
    table = everyone.cpu()
    first, last = len(facts), len(facts) + len(samples)
    return Gathered(tuple(facts), table[:, first:last].long(), table[:, last:].sum(0), table)


def by_rank(values: Sequence[float]) -> list[int] | dict[str, Any]:
    """Return the number of each rank, or of many ranks the largest, its rank and the median."""
    whole = [int(value) for value in values]
    if len(whole) <= MOST_LISTED:
        return whole
    largest = max(whole)
    return {"max": largest, "median": int(median(whole)), "rank": whole.index(largest)}


def memory(device: torch.device) -> dict[str, float]:
    """Return this rank's bytes, by the names in `MEMORY`.

    Peaks are those since the process began: of tensors, and of what the process takes on its GPU,
    with what the allocator could not hand out, CUDA's context and NCCL's buffers. On CPU all are
    the peak resident set of the process. Host bytes are resident now.
    """
    resident = _resident_bytes()
    if device.type != "cuda":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return dict(zip(MEMORY, (peak, peak, peak, resident), strict=True))
    free, total = torch.cuda.mem_get_info(device)
    beyond_the_allocator = max(0, total - free - torch.cuda.memory_reserved(device))
    reserved = torch.cuda.max_memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    numbers = (peak, reserved + beyond_the_allocator, reserved, resident)
    return dict(zip(MEMORY, numbers, strict=True))


def _resident_bytes() -> int:
    """Return the bytes of this process in host memory now."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")
