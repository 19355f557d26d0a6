# SPDX-License-Identifier: Apache-2.0
"""Sizes in a sentence on memory that ran out.

PyTorch's sentence has had three forms: sizes in brackets with what is `already allocated` (up to
2.0), `total capacty` (2.1), and `total capacity` with private pools and limits of the process (from
2.2). Other libraries state at most what was asked for.
"""

import re
from dataclasses import dataclass

_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = r"([\d,]+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB|TiB|B\b)"
_FIELDS = {
    "asked": (
        rf"tr(?:ied|ying) to allocate {_SIZE}",
        rf"failed to CUDA (?:host )?[cm]?alloc(?: async)? {_SIZE}",
        rf"(?:allocating|unable to allocate|malloc of size|alloc of size) {_SIZE}",
        r"(?:malloc|alloc) of size ([\d,]+)()",
    ),
    "capacity": (rf"total capaci?ty of {_SIZE}", rf"{_SIZE} total capacity"),
    "free": (rf"of which {_SIZE} is free", rf"{_SIZE} free"),
    "in_use": (rf"this process has {_SIZE} memory in use",),
    "allocated": (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
    "unallocated": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"{_SIZE} reserved in total", rf"{_SIZE} cached"),
    "allowed": (rf"{_SIZE} allowed",),
}
_PATTERNS = {
    name: [re.compile(pattern, re.IGNORECASE) for pattern in patterns]
    for name, patterns in _FIELDS.items()
}
_OTHERS = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_GPU = re.compile(r"\bGPU ?(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What a failed allocation says of memory, in bytes; None for what it does not say."""

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
    def known(self) -> int:
        """The number of sizes that are stated."""
        stated = (self.asked, self.capacity, self.free, self.in_use, self.allocated)
        return sum(one is not None for one in (*stated, self.unallocated, self.allowed))

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


def sizes(sentence: str) -> Sizes:
    """Return the sizes in a sentence on one line."""
    known = {name: _first(sentence, patterns) for name, patterns in _PATTERNS.items()}
    reserved, allocated = known.pop("reserved"), known["allocated"]
    if known["unallocated"] is None and reserved is not None and allocated is not None:
        known["unallocated"] = max(0.0, reserved - allocated)
    gpu = _GPU.search(sentence)
    others = sum(_bytes(*pair) for pair in _OTHERS.findall(sentence))
    # "Process N" is this process if the line has no "this process", as in a container.
    if known["in_use"] is None and others:
        known["in_use"], others = others, 0.0
    return Sizes(gpu=None if gpu is None else int(gpu[1]), others=others, **known)


def _first(sentence: str, patterns: list[re.Pattern[str]]) -> float | None:
    matches = (pattern.search(sentence) for pattern in patterns)
    return next((_bytes(*match.groups()) for match in matches if match), None)


def _bytes(number: str, unit: str) -> float:
    return float(number.replace(",", "")) * _UNITS.get(unit.lower(), 1)
