# SPDX-License-Identifier: Apache-2.0
"""Whether a measurement had its GPU to itself.

Two signs say that it had not: NVML lists a process that is not of this session, or a canary, a
product and a copy of known size before each case, is slower than at the beginning. A case with
either is marked as disturbed, and no goal counts it. Clocks, power and free memory are recorded
with each case.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from benchmarks.harness.processes import children_of

LEAST = 0.9
"""Share of the first canary's rates below which a case is disturbed."""
REPEATS = 5
PAUSE = 2.0
"""Seconds before a slow canary is repeated: clocks come back after a case at the power limit."""
INTERVAL = 0.5
"""Seconds between two looks at NVML."""
LEAST_FREE = 0.9
"""Share of its memory that a GPU must have free before anything is measured."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Rates of a square product and of a copy within the device."""

    tflops: float
    gbps: float
    """Bytes read and written."""

    def share(self, first: "Canary") -> float:
        """Return the lower of the two rates, as a share of those of another canary."""
        return min(self.tflops / first.tflops, self.gbps / first.gbps)


def canary(device: torch.device) -> Canary:
    """Measure both rates: 8192^3 in bf16 and 2 GiB on a GPU, small ones on a CPU."""
    on_cuda = device.type == "cuda"
    side, size = (8192, 2**31) if on_cuda else (256, 2**22)
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    if on_cuda:
        a, b = a.bfloat16(), b.bfloat16()
    there = torch.empty(size, dtype=torch.uint8, device=device)
    back = torch.empty_like(there)
    product = _seconds(lambda: torch.mm(a, b), on_cuda)
    copy = _seconds(lambda: back.copy_(there), on_cuda)
    return Canary(tflops=2 * side**3 / product / 1e12, gbps=2 * size / copy / 1e9)


def _seconds(run: Callable[[], object], on_cuda: bool) -> float:
    """Return the median of some runs, after two that are not counted."""
    found = []
    for _ in range(2 + REPEATS):
        if on_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if on_cuda:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[2:])


class Sensors:
    """NVML's answers about the first GPU; none on a CPU or without NVML.

    In a container NVML can list the numbers that processes have on the host, where this process
    has another one. Then what was listed at first counts as known, and a newcomer as a stranger
    unless this process has started a child since, which it might be.
    """

    def __init__(self, device: torch.device) -> None:
        """Look for the device; a process that computes on it already knows itself."""
        found: tuple[Any, Any] = _first_gpu() if device.type == "cuda" else (None, None)
        self._nvml, self._handle = found
        self._mine: set[int] = {os.getpid()}
        listed = self.processes()
        self._hidden = bool(listed) and os.getpid() not in listed
        self._known = listed if self._hidden else set()
        self._before = _children() if self._hidden else set()

    def processes(self) -> set[int]:
        """Return the processes that compute on the GPU."""
        if self._nvml is None:
            return set()
        try:
            found = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:  # a virtual GPU may not tell
            return set()
        return {each.pid for each in found}

    def strangers(self) -> set[int]:
        """Return those of them that neither are this one nor were started by it."""
        listed = self.processes()
        if not listed - self._mine - self._known:
            return set()  # and nothing is looked for, which would cost the host time
        children = _children()
        self._mine |= children
        if self._hidden and children - self._before:
            return set()
        return listed - self._mine - self._known

    def clock_and_power(self) -> tuple[float, float] | None:
        """Return MHz of the multiprocessors and watts."""
        if self._nvml is None:
            return None
        try:
            clock = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
            return float(clock), self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000
        except self._nvml.NVMLError:
            return None


def _children() -> set[int]:
    """Return the processes that this one has started, and those that they have."""
    return {each.pid for each in children_of(os.getpid())}


def _first_gpu() -> tuple[ModuleType | None, Any]:
    """Return NVML's module and its handle of the first visible GPU, or twice None."""
    import pynvml  # type: ignore[import-untyped]  # the module of nvidia-ml-py

    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    try:
        pynvml.nvmlInit()
        if first.isdigit():
            return pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(first))
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(first)
    except pynvml.NVMLError:
        return None, None


def refusal(device: torch.device, sensors: Sensors) -> str:
    """Return why nothing should be measured here, in a sentence; empty if nothing is in the way.

    Must be asked before this process computes on the GPU.
    """
    if others := sensors.processes() - {os.getpid()}:
        return (
            f"{len(others)} other process(es) compute on this GPU "
            f"({', '.join(map(str, sorted(others)))}); end them first, since figures of a shared "
            "GPU mean nothing"
        )
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    if free < LEAST_FREE * total:
        return (
            f"{(total - free) / 2**30:.1f} of {total / 2**30:.0f} GiB of this GPU are in use; "
            "free them first"
        )
    return ""


@dataclass(slots=True)
class Watch:
    """Looks at the GPU while a case runs, in a thread of its own."""

    strangers: Callable[[], set[int]]
    clock_and_power: Callable[[], tuple[float, float] | None] = lambda: None
    interval: float = INTERVAL
    seen: set[int] = field(default_factory=set)
    """Processes of others."""
    samples: list[tuple[float, float]] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> "Watch":
        self._look()
        self._thread = threading.Thread(target=self._run, name="gpu watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        assert self._thread is not None
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._ended.wait(self.interval):
            self._look()

    def _look(self) -> None:
        self.seen |= self.strangers()
        if (sample := self.clock_and_power()) is not None:
            self.samples.append(sample)

    def figures(self) -> dict[str, float]:
        """Return the lowest and the median clock, and the most power."""
        if not self.samples:
            return {}
        clocks, watts = zip(*self.samples, strict=True)
        return {
            "least_mhz": min(clocks), "median_mhz": statistics.median(clocks),
            "most_watts": round(max(watts), 1),
        }  # fmt: skip


class Guard:
    """The signs of one session: the canary that others are compared with, and the sensors."""

    def __init__(
        self,
        device: torch.device,
        first: Canary | None = None,
        *,
        measure: Callable[[torch.device], Canary] = canary,
        sensors: Sensors | None = None,
        least: float = LEAST,
        pause: float = PAUSE,
    ) -> None:
        """Take the first canary of the rental, or measure it."""
        self.device, self._measure, self._pause = device, measure, pause
        self.least = least
        self.sensors = sensors or Sensors(device)
        self.first = first or measure(device)

    def before(self) -> tuple[dict[str, float], str]:
        """Return figures of the device before a case, and why it would be disturbed."""
        now = self._measure(self.device)
        if now.share(self.first) < self.least:
            time.sleep(self._pause)
            now = self._measure(self.device)
        share = now.share(self.first)
        figures = {"tflops": round(now.tflops, 2), "gbps": round(now.gbps, 2)}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of the canary
            figures["free_gib"] = round(torch.cuda.mem_get_info(self.device)[0] / 2**30, 2)
        slow = f"the canary before it has {share:.2f} of the first one's rate"
        return figures, slow if share < self.least else ""

    def watch(self) -> Watch:
        """Return what looks at the GPU during a case."""
        return Watch(self.sensors.strangers, self.sensors.clock_and_power)
