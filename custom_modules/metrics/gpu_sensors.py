# SPDX-License-Identifier: Apache-2.0
"""Utilisation, power and clock of a GPU, sampled by a thread of their own through NVML.

NVML's answers take up to some milliseconds, so no step asks for them: a step has the mean of the
samples since the one before, and a step that is shorter than the interval the last sample. torch
finds the device of NVML that is its own (CUDA_VISIBLE_DEVICES, MIG) and asks the module `pynvml` of
the package nvidia-ml-py.
"""

import math
import threading
from collections.abc import Callable

import torch

SECONDS = 1.0
"""Between samples: NVML's own periods are 1/6 to 1 second."""
UNKNOWN = (math.nan, math.nan, math.nan)


class GpuSensors:
    """Samples of one GPU: percent of time with a kernel, watts, and MHz of its multiprocessors."""

    def __init__(self, device: torch.device, seconds: float = SECONDS) -> None:
        """Take the device; nothing is sampled of a CPU."""
        self._device, self._seconds = device, seconds
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._samples: list[tuple[float, float, float]] = []
        self._last = UNKNOWN
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Sample until `stop`."""
        if self._device.type == "cuda" and self._thread is None:
            self._thread = threading.Thread(target=self._sample, name="gpu sensors", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * self._seconds)

    def means(self) -> tuple[float, float, float]:
        """Return the means of the samples since the last call; NaN of what is not known."""
        with self._lock:
            samples, self._samples = self._samples or [self._last], []
        utilization, watts, mhz = (
            sum(column) / len(samples) for column in zip(*samples, strict=True)
        )
        return utilization, watts, mhz

    def _sample(self) -> None:
        while not self._ended.wait(self._seconds):
            sample = (
                _read(torch.cuda.utilization, self._device),
                _read(torch.cuda.power_draw, self._device) / 1000,
                _read(torch.cuda.clock_rate, self._device),
            )
            with self._lock:
                self._samples.append(sample)
                self._last = sample
            if all(map(math.isnan, sample)):  # a driver that is gone does not come back
                return


def _read(sensor: Callable[[torch.device], int], device: torch.device) -> float:
    """Return what a sensor says; NaN if the GPU has none, as in a MIG slice, or without NVML."""
    try:
        return float(sensor(device))
    except Exception:  # NVML's errors have a base class of their own
        return math.nan
