# SPDX-License-Identifier: Apache-2.0
"""Page-locked host memory of exact sizes, allocated once and reused, with a cap.

A GPU copies to and from host memory concurrently with computation only if the pages are locked.
PyTorch's pinned allocator rounds every size up to a power of two; buffers here are plain memory,
registered with CUDA afterwards, so that a cap in GiB is exact.

A fork cannot share locked pages by copy-on-write, so the kernel copies all of them at once. A rank
forks while it holds buffers: Megatron's asynchronous checkpoint and its writers, and the workers of
a DataLoader. Each buffer therefore is a mapping of its own that forked processes do not get
(`MADV_DONTFORK`, madvise(2)); they must not read it.
"""

import ctypes
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from custom_modules.profiling.categories import category

GIB = 2**30
CGROUPS = Path("/sys/fs/cgroup")
LEFT_TO_HOST = GIB
"""Host memory that is never pinned: it is left to the rest of the machine."""


def host_memory_left() -> int:
    """Return the bytes that this machine, or its container, can still allocate without swap."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    left = int(fields["MemAvailable"].split()[0]) * 1024
    return min([left, *left_to_groups(Path("/proc/self/cgroup").read_text(), CGROUPS)])


def left_to_groups(joined: str, root: Path) -> Iterator[int]:
    """Yield the bytes that each control group of this process has left, without the page cache.

    `joined` is /proc/self/cgroup: a line is `0::/path` in version 2, `N:memory:/path` in version 1.
    A batch system limits a job by a group below the root.
    """
    for entry in joined.splitlines():
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            top, limit, used, cache = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *(one for one in group.parents if one.is_relative_to(top))):
            try:
                lines = (folder / "memory.stat").read_text().splitlines()
                reclaimable = int(dict(line.split() for line in lines).get(cache, 0))
                taken = int((folder / used).read_text()) - reclaimable
                yield int((folder / limit).read_text()) - taken
            except (OSError, ValueError):  # no such file here, or "max"
                continue


_MAPPINGS: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _keep_for_ever() -> None:
    """Have a forked process never unmap buffers: it may have other memory at their addresses."""
    for pages in _MAPPINGS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pages))


os.register_at_fork(after_in_child=_keep_for_ever)


def own_pages(size: int) -> Tensor:
    """Return a uint8 buffer [size] on pages of its own, which a forked process does not have."""
    pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    _MAPPINGS.add(pages)
    storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    return empty.set_(storage, 0, (size,), (1,))  # an operator, as those that count memory need


class HostPool:
    """Page-locked buffers by size, allocated once and reused; a cap limits their sum."""

    def __init__(
        self, cap_bytes: int, *, pin: bool, memory_left: Callable[[], int] = host_memory_left
    ) -> None:
        """Begin with nothing; `pin` locks the pages, which needs a CUDA device."""
        self.cap_bytes, self.pin, self.memory_left = cap_bytes, pin, memory_left
        self.made_bytes = 0
        self._free: dict[int, list[tuple[Tensor, object]]] = {}
        self._buffers: list[Tensor] = []
        self._process = os.getpid()

    def take(self, size: int) -> tuple[Tensor, object]:
        """Return a buffer of `size` bytes and the end of the last copy from it, or None.

        Raises MemoryError if the cap, or the machine's free memory, is too small.
        """
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        self.require(size)
        with category("host"):
            buffer = own_pages(size)
        if self.pin:
            error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0)
            if int(error):
                raise MemoryError(
                    f"offload could not lock {size / GIB:.2f} GiB of host memory (CUDA error "
                    f"{int(error)}) after {self.made_bytes / GIB:.2f} GiB; raise the limit of "
                    "locked memory (ulimit -l), or lower cap_gib"
                )
        self._buffers.append(buffer)
        self.made_bytes += size
        return buffer, None

    def require(self, size: int, *, ranks: int = 1) -> None:
        """Raise MemoryError if `size` bytes more would exceed the cap or the machine's memory.

        `ranks` ranks of this machine are about to take the same.
        """
        if self.made_bytes + size > self.cap_bytes:
            raise MemoryError(
                f"offload needs {(self.made_bytes + size) / GIB:.3g} GiB of host memory or more, "
                f"and its cap_gib is {self.cap_bytes / GIB:g}; raise it, or offload fewer layers"
            )
        left = self.memory_left() - LEFT_TO_HOST
        if size * ranks > left:
            raise MemoryError(
                f"offload needs {size * ranks / GIB:.3g} GiB more host memory for {ranks} ranks, "
                f"and the machine has {max(0, left) / GIB:.3g} GiB left for it; it would swap: "
                "offload fewer layers"
            )

    def reserve(self, size: int, count: int) -> None:
        """Hold at least `count` free buffers of `size` bytes, so that `take` locks no pages later.

        Locking takes a second for some 4 GiB. Raises MemoryError as `take` does.
        """
        for buffer, end in [self.take(size) for _ in range(count)]:
            self.give(buffer, end)

    def sizes(self) -> Counter[int]:
        """Return how many buffers of each size in bytes were made."""
        return Counter(buffer.numel() for buffer in self._buffers)

    def give(self, buffer: Tensor, end: object) -> None:
        """Take a buffer back; it may be written again after `end`."""
        self._free.setdefault(buffer.numel(), []).append((buffer, end))

    def __del__(self) -> None:
        if self.pin and self._buffers and self._process == os.getpid():
            torch.cuda.synchronize()  # copies may still read and write them
            for buffer in self._buffers:
                torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
