# SPDX-License-Identifier: Apache-2.0
"""Out-of-memory errors in a log: of PyTorch's allocators, of NCCL, of the host and of the kernel.

PyTorch's sentence has had three forms: sizes in brackets with what is `already allocated` (up to
2.0), `total capacty` (2.1), and `total capacity` with private pools and limits of the process (from
2.2). Many ranks write it at once; the one that asked for most is taken.

A log may have any size: it is read block by block, and only lines with one of `_HINTS` are parsed;
of long lines only the text around the hint.
"""

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

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
_NEAR = r"[^\n]{0,300}"
"""Text between two words of one sentence."""
_PINNED = re.compile(
    rf"offload (?:could not lock|needs {_NEAR}host memory)|cudaHostAlloc|cudaHostRegister"
    rf"|(?:pin|pinned)[ _]memory{_NEAR}(?:fail|out of memory|cannot|error)"
    rf"|(?:fail|cannot|could not){_NEAR}(?:pin|pinned)[ _]memory"
    rf"|page-lock{_NEAR}(?:fail|cannot)",
    re.I,
)
_PINS = re.compile(r"pin_memory|\bcudaHostAlloc\b|\bcudaHostRegister\b")
"""A call that locks host memory. CUDA reports its failure as it does that of GPU memory."""
TRACEBACK = 10
"""Lines of a traceback between that call and its error."""
_HOST = re.compile(
    rf"(?:DefaultCPUAllocator: (?:can't|not enough){_NEAR}|not enough memory: )"
    r"you tried to allocate (\d+) ?bytes",
    re.I,
)
_HOST_PLAIN = re.compile(r"\bMemoryError\b|std::bad_alloc|\[Errno 12\]")
_NCCL = re.compile(
    r"Cuda failure (?:\d+ )?'out of memory'|NCCL WARN Failed to CUDA (?:host )?(?:c|m)?alloc"
    rf"|NCCL{_NEAR}(?:ncclUnhandledCudaError|unhandled cuda error){_NEAR}out of memory"
)
_NCCL_SIZE = re.compile(r"Failed to CUDA (?:host )?(?:c|m)?alloc(?: async)? (\d+) bytes")
_SHARED = re.compile(
    rf"insufficient shared memory|/dev/shm{_NEAR}(?:No space|to \d+ bytes)|Bus error"
)
_KILLED = re.compile(
    r"[Oo]ut of memory: Kill(?:ed)? process|\boom[-_]kill event|invoked oom-killer"
    r"|oom-kill:constraint|OOM ?Killed|(?<![_A-Z])OUT_OF_MEMORY|[Ee]xit ?code *:? *\(?(?:-9|137)\b"
    r"|Signal 9 \(SIGKILL\)|killed by signal: Killed"
    rf"|srun: error: {_NEAR}\btasks? [^:\n]+: (?:Killed|Out Of Memory)|: line \d+: +\d+ Killed\b"
)
_DEVICE_PLAIN = re.compile(
    r"CUDA (?:driver )?error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation"
    r"|CUDA_ERROR_OUT_OF_MEMORY|Error: CUDA out of memory"
    r"|Allocation on device \d+ would exceed allowed memory",
    re.I,
)
_HINTS = (
    b"out of memory", b"out_of_memory", b"tried to allocate", b"exceed allowed", b"alloc_failed",
    b"memoryallocation", b"failed to cuda", b"cudahost", b"offload needs", b"could not lock",
    b"pin memory", b"pin_memory", b"pinned memory", b"pinned_memory", b"page-lock", b"memoryerror",
    b"bad_alloc", b"errno 12]", b"insufficient shared memory", b"/dev/shm", b"bus error", b"exit",
    b"signal 9", b"kill",
)  # fmt: skip
"""In lower case: every line in which a pattern above is found contains one of these."""
BLOCK = 2**20
"""Bytes of a log that are held at once."""
BEFORE, AFTER = 2**10, 2**12
"""Bytes around a hint that are parsed: more than a sentence of any of these libraries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One failed allocation, or a process that the kernel ended; sizes in bytes, None unknown."""

    kind: Kind
    line: str
    """Its line in the log."""
    number: int
    count: int = 1
    """Number of occurrences in the log."""
    gpu: int | None = None
    asked: float | None = None
    capacity: float | None = None
    free: float | None = None
    in_use: float | None = None
    """By this process, including what is outside PyTorch."""
    allocated: float | None = None
    unallocated: float | None = None
    """Reserved by PyTorch and unused."""
    allowed: float | None = None
    """The limit that the process set itself."""
    others: float = 0.0
    """In use by other processes."""

    @property
    def fragmented(self) -> bool:
        """Return whether the reserved and unused memory would have held the request."""
        if self.unallocated is None or self.asked is None:
            return False
        return self.unallocated >= self.asked and self.unallocated >= 2**28

    @property
    def outside(self) -> float | None:
        """Bytes that the process uses outside PyTorch."""
        if self.in_use is None or self.allocated is None:
            return None
        return max(0.0, self.in_use - self.allocated - (self.unallocated or 0.0))

    @property
    def needed(self) -> float | None:
        """Bytes that PyTorch would have held with the request."""
        if self.allocated is None or self.asked is None:
            return None
        return self.allocated + self.asked


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """The out-of-memory errors of a log."""

    failures: tuple[Failure, ...]
    empty: bool = False
    """Whether it has nothing but white space."""
    binary: bool = False
    """Whether its beginning has NUL bytes."""


def read(path: Path) -> Log:
    """Return the errors of a log; raise ValueError if there is no such file."""
    if not path.is_file():
        raise ValueError(f"--log {path} is not a file; name the output of a rank")
    with path.open("rb") as file:
        beginning = file.read(BLOCK)
        if len(beginning) < BLOCK and not beginning.strip():
            return Log(failures=(), empty=True)
        file.seek(0)
        return Log(failures=tuple(_by_kind(file)), binary=b"\0" in beginning)


def failures(text: str) -> list[Failure]:
    """Return the failures of a log's text, one of each kind, in the order they first occur."""
    return _by_kind(io.BytesIO(text.encode()))


def _by_kind(file: BinaryIO) -> list[Failure]:
    found: dict[str, Failure] = {}
    for one in _each(file):
        before = found.get(one.kind)
        if before is None:
            found[one.kind] = one
            continue
        larger = one if (one.asked or 0.0) > (before.asked or 0.0) else before
        found[one.kind] = replace(larger, count=before.count + 1)
    return sorted(found.values(), key=lambda one: one.number)


def _each(file: BinaryIO) -> Iterator[Failure]:
    pins = -TRACEBACK
    for number, line in _suspects(file):
        if _PINS.search(line) is not None:
            pins = number
        for meant in (_device, _nccl, _pinned, _host, _shared, _killed, _device_plain):
            failure = meant(line, number)
            if failure is not None:
                of_host = meant is _device_plain and number - pins < TRACEBACK
                yield replace(failure, kind="pinned") if of_host else failure
                break


def _suspects(file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield the lines with a hint and their numbers, long ones cut to the text around it."""
    held, first, seen = b"", 1, 0  # bytes, the number of their first line, how many are processed
    while True:
        block = file.read(BLOCK)
        held += block
        until = max(0, len(held) - AFTER) if block else len(held)
        number, counted = first, 0
        for hint in _hints(held, seen, until):
            if hint < seen:
                continue  # another hint of the line before
            start, end = _around(held, hint, seen)
            number, counted = number + held.count(b"\n", counted, start), start
            yield number, held[start:end].decode("utf-8", errors="replace")
            seen = end if end < hint + AFTER else hint + AFTER - BEFORE
        if not block:
            return
        done = max(0, until - BEFORE)
        first += held.count(b"\n", 0, done)
        held, seen = held[done:], max(seen, until) - done


def _hints(held: bytes, since: int, until: int) -> list[int]:
    """Return the offsets of hints in ascending order."""
    small, found = held.lower(), []
    for hint in _HINTS:
        place = small.find(hint, since)
        while 0 <= place < until:
            found.append(place)
            place = small.find(hint, place + 1)
    return sorted(found)


def _around(held: bytes, hint: int, seen: int) -> tuple[int, int]:
    """Return the bounds of a hint's line, or of the text near it; a progress bar's CR ends one."""
    low, high = max(seen, hint - BEFORE), hint + AFTER
    breaks = [held.rfind(mark, low, hint) for mark in (b"\n", b"\r")]
    ends = [held.find(mark, hint, high) for mark in (b"\n", b"\r")]
    start = max(low, *(place + 1 for place in breaks))
    return start, min([place for place in ends if place >= 0] or [min(high, len(held))])


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
    # "Process N" is this process if the line has no "this process", as in a container.
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
