# SPDX-License-Identifier: Apache-2.0
"""Page-locked host memory of exact sizes, allocated once and reused, with a cap.

A GPU copies to and from host memory beside its computation only where the pages are locked.
PyTorch's pinned allocator rounds every size up to a power of two; buffers here are plain memory,
registered with CUDA afterwards, so that a cap in GiB means what it says.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from custom_modules.causes import cause

GIB = 2**30
LEFT_TO_HOST = GIB
"""Host memory that is never pinned: the rest of the machine lives in it."""


def host_memory_left() -> int:
    """Return the bytes this machine, or the container it is, can still hand out without swap."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    left = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            left = min(left, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return left


class HostPool:
    """Page-locked buffers by size, made once and reused; a cap holds their sum."""

    def __init__(
        self, cap_bytes: int, *, pin: bool, memory_left: Callable[[], int] = host_memory_left
    ) -> None:
        """Begin with nothing; `pin` locks the pages, which takes a CUDA device."""
        self.cap_bytes, self.pin, self.memory_left = cap_bytes, pin, memory_left
        self.made_bytes = 0
        self._free: dict[int, list[tuple[Tensor, object]]] = {}

    def take(self, size: int) -> tuple[Tensor, object]:
        """Return a buffer of `size` bytes and the end of the last copy from it, or None.

        Raises MemoryError where the cap, or what the machine has left, is too small.
        """
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        self.require(size)
        with cause("host"):
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        if self.pin:
            error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0)
            if int(error):
                raise MemoryError(
                    f"offload could not lock {size / GIB:.2f} GiB of host memory (CUDA error "
                    f"{int(error)}) after {self.made_bytes / GIB:.2f} GiB; raise the limit of "
                    "locked memory (ulimit -l), or lower cap_gib"
                )
        self.made_bytes += size
        return buffer, None

    def require(self, size: int) -> None:
        """Raise MemoryError where `size` bytes more would break the cap or the machine."""
        if self.made_bytes + size > self.cap_bytes:
            raise MemoryError(
                f"offload needs {(self.made_bytes + size) / GIB:.3f} GiB of host memory or more, "
                f"and its cap_gib is {self.cap_bytes / GIB:g}; raise it, or offload fewer layers"
            )
        left = self.memory_left() - LEFT_TO_HOST
        if size > left:
            raise MemoryError(
                f"offload needs {size / GIB:.2f} GiB more host memory, and the machine has "
                f"{max(0, left) / GIB:.2f} GiB left for it; it would swap: offload fewer layers"
            )

    def give(self, buffer: Tensor, end: object) -> None:
        """Take a buffer back; it is written again after `end`."""
        self._free.setdefault(buffer.numel(), []).append((buffer, end))

    def close(self) -> None:
        """Let go of every buffer that is not in use."""
        for buffer, _ in (pair for free in self._free.values() for pair in free):
            if self.pin:
                torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
            self.made_bytes -= buffer.numel()
        self._free.clear()

    def __del__(self) -> None:
        if self.pin and self._free:
            torch.cuda.synchronize()
            self.close()
