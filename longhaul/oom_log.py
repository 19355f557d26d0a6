# SPDX-License-Identifier: Apache-2.0
"""What a log says of memory that ran out: PyTorch's allocators, NCCL's, the host's, the kernel's.

PyTorch's sentence has had three forms: sizes in brackets with what is `already allocated` (up to
2.0), `total capacty` (2.1), and `total capacity` with private pools and limits of the process (from
2.2). Many ranks write it at once; the one that asked for most is taken.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

Kind = Literal["device", "nccl", "pinned", "host", "killed", "shared"]

_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB|TiB)"
_ASKED = re.compile(rf"Tried to allocate {_SIZE}")
_GPU = re.compile(r"\bGPU (\d+)\b")
_FIELDS = {
    "capacity": (rf"total capaci?ty of {_SIZE}", rf"{_SIZE} total capacity"),
    "free": (rf"of which {_SIZE} is free", rf"{_SIZE} free"),
    "in_use": (rf"this process has {_SIZE} memory in use",),
    "allocated": (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
    "unallocated": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"{_SIZE} reserved in total", rf"{_SIZE} cached"),
    "allowed": (rf"{_SIZE} allowed",),
}
_OTHERS = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_PINNED = re.compile(
    r"offload (?:could not lock|needs [^\n]*host memory)|cudaHostAlloc|cudaHostRegister"
    r"|(?:pin|pinned)[ _-]memory[^\n]*(?:fail|out of memory|cannot|error)"
    r"|(?:fail|cannot|could not)[^\n]*(?:pin|pinned)[ _-]memory|page-?lock[^\n]*(?:fail|cannot)",
    re.I,
)
_HOST = re.compile(
    r"(?:DefaultCPUAllocator: (?:can't|not enough)[^\n]*|not enough memory: )you tried to allocate "
    r"(\d+) ?bytes",
    re.I,
)
_HOST_PLAIN = re.compile(r"\bMemoryError\b|std::bad_alloc|\[Errno 12\]")
_NCCL = re.compile(
    r"NCCL WARN (?:Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA (?:host )?(?:c|m)?alloc)"
    r"|NCCL[^\n]*(?:ncclUnhandledCudaError|unhandled cuda error)[^\n]*out of memory"
)
_NCCL_SIZE = re.compile(r"Failed to CUDA (?:host )?(?:c|m)?alloc(?: async)? (\d+) bytes")
_SHARED = re.compile(
    r"insufficient shared memory|/dev/shm[^\n]*(?:No space|to \d+ bytes)|Bus error"
)
_KILLED = re.compile(
    r"Out of memory: Killed process|oom[-_]kill|OOM Killed|(?<![_A-Z])OUT_OF_MEMORY"
    r"|[Ee]xit ?code *:? *\(?(?:-9|137)\b|Signal 9 \(SIGKILL\)|killed by signal: Killed"
)
_DEVICE_PLAIN = re.compile(
    r"CUDA (?:driver )?error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation"
    r"|CUDA_ERROR_OUT_OF_MEMORY"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One failed allocation, or a process that the kernel ended; sizes in bytes, None unknown."""

    kind: Kind
    line: str
    """Where it stands in the log."""
    number: int
    count: int = 1
    """How often the log says so."""
    gpu: int | None = None
    asked: float | None = None
    capacity: float | None = None
    free: float | None = None
    in_use: float | None = None
    """By this process, what is not PyTorch's included."""
    allocated: float | None = None
    unallocated: float | None = None
    """Reserved by PyTorch and unused."""
    allowed: float | None = None
    """The limit that the process set itself."""
    others: float = 0.0
    """In use by other processes."""

    @property
    def fragmented(self) -> bool:
        """Whether what is reserved and unused would have held what was asked for."""
        if self.unallocated is None or self.asked is None:
            return False
        return self.unallocated >= self.asked and self.unallocated >= 2**28

    @property
    def outside(self) -> float | None:
        """What the process has in use beside PyTorch's own."""
        if self.in_use is None or self.allocated is None:
            return None
        return max(0.0, self.in_use - self.allocated - (self.unallocated or 0.0))

    @property
    def needed(self) -> float | None:
        """What PyTorch would have held at this moment."""
        if self.allocated is None or self.asked is None:
            return None
        return self.allocated + self.asked


def read(path: Path) -> str:
    """Return the text of a log; raise ValueError where there is none."""
    if not path.is_file():
        raise ValueError(f"--log {path} is not a file")
    return path.read_text("utf-8", errors="replace")


def failures(text: str) -> list[Failure]:
    """Return the failures of a log, one of each kind, in the order they first occur."""
    found: dict[str, Failure] = {}
    for one in _each(text):
        before = found.get(one.kind)
        if before is None:
            found[one.kind] = one
            continue
        larger = one if (one.asked or 0.0) > (before.asked or 0.0) else before
        found[one.kind] = replace(larger, count=before.count + 1)
    return sorted(found.values(), key=lambda one: one.number)


def _each(text: str) -> Iterator[Failure]:
    for number, line in enumerate(text.splitlines(), 1):
        for meant in (_device, _nccl, _pinned, _host, _shared, _killed, _device_plain):
            failure = meant(line, number)
            if failure is not None:
                yield failure
                break


def _device(line: str, number: int) -> Failure | None:
    asked = _ASKED.search(line)
    if asked is None or "out of memory" not in line:
        return None
    sizes = {name: _first(line, patterns) for name, patterns in _FIELDS.items()}
    reserved, allocated = sizes.pop("reserved"), sizes["allocated"]
    if sizes["unallocated"] is None and reserved is not None and allocated is not None:
        sizes["unallocated"] = max(0.0, reserved - allocated)
    gpu = _GPU.search(line)
    others = sum(_bytes(*pair) for pair in _OTHERS.findall(line))
    # "Process N" is this process where no "this process" is said, as in a container.
    if sizes["in_use"] is None and others:
        sizes["in_use"], others = others, 0.0
    return Failure(
        kind="device",
        line=line.strip(),
        number=number,
        gpu=None if gpu is None else int(gpu[1]),
        asked=_bytes(*asked.groups()),
        others=others,
        capacity=sizes["capacity"],
        free=sizes["free"],
        in_use=sizes["in_use"],
        allocated=allocated,
        unallocated=sizes["unallocated"],
        allowed=sizes["allowed"],
    )


def _first(line: str, patterns: tuple[str, ...]) -> float | None:
    for pattern in patterns:
        found = re.search(pattern, line)
        if found is not None:
            return _bytes(*found.groups())
    return None


def _bytes(number: str, unit: str) -> float:
    return float(number) * _UNITS[unit]


def _plain(kind: Kind, pattern: re.Pattern[str]) -> Callable[[str, int], Failure | None]:
    def meant(line: str, number: int) -> Failure | None:
        if pattern.search(line) is None:
            return None
        return Failure(kind=kind, line=line.strip(), number=number)

    return meant


def _nccl(line: str, number: int) -> Failure | None:
    if _NCCL.search(line) is None:
        return None
    size = _NCCL_SIZE.search(line)
    asked = None if size is None else float(size[1])
    return Failure(kind="nccl", line=line.strip(), number=number, asked=asked)


def _host(line: str, number: int) -> Failure | None:
    found = _HOST.search(line)
    if found is not None:
        return Failure(kind="host", line=line.strip(), number=number, asked=float(found[1]))
    if _HOST_PLAIN.search(line) is not None:
        return Failure(kind="host", line=line.strip(), number=number)
    return None


_pinned = _plain("pinned", _PINNED)
_shared = _plain("shared", _SHARED)
_killed = _plain("killed", _KILLED)
_device_plain = _plain("device", _DEVICE_PLAIN)
