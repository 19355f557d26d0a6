# SPDX-License-Identifier: Apache-2.0
"""Details in the sentence of a fault: rank, group, collective, iteration, job, file, and sizes.

PyTorch's sentence on memory has had three forms: sizes in brackets with what is `already allocated`
(up to 2.0), `total capacty` (2.1), and `total capacity` with private pools and limits of the
process (from 2.2). Other libraries state at most what was asked for.
"""

import re
from dataclasses import dataclass

_RANK = re.compile(r"(?:\brank|global_rank)[ :=#]*(\d+)", re.IGNORECASE)
_XIDS = {
    13: "an exception of the program", 31: "an access to memory that is not mapped",
    43: "the GPU stopped the program", 45: "the program was ended",
    48: "a double-bit ECC error", 63: "a row of memory was remapped",
    64: "a row of memory could not be remapped", 74: "an error of NVLink",
    79: "the GPU has fallen off the bus", 94: "a contained ECC error",
    95: "an uncontained ECC error", 119: "the GPU's system processor does not answer",
    120: "the GPU's system processor failed", 140: "an unrecovered ECC error",
}  # fmt: skip
_FIELDS = {
    "group": r"PG (?:ID )?(?P<id>\w+)(?: PG GUID (?P<guid>[\w:]+)(?:\((?P<name>[^)]*)\))?)?",
    "sequence number": r"SeqNum=(\d+)|at work(?: sequence id)?: (\d+)",
    "operation": r"OpType=(\w+)|waiting \d+ ?ms for (\w+) operation",
    "elapsed": r"ran for (\d+) ?milliseconds|got stuck for (\d+) seconds",
    "timeout": r"Timeout\(ms\) ?= ?(\d+)|waiting (\d+) ?ms|monitoredBarrier in (\d+)"
    r"|timed out after (\d+) ?(?:s\b|sec)|wait timeout after (\d+) ?ms",
    "last enqueued": r"last enqueued (?:NCCL )?work: (-?\d+)",
    "last completed": r"last completed (?:NCCL )?work: (-?\d+)",
    "iteration": r"\b(?:iteration|global_step|step)['\"]?[ :=#]+(\d+)",
    "node": r"\bnode[ :=]+(?!failure)([\w.-]+)|\b(?:JOB|STEP) \S+ ON (\S+)|Node failure on (\S+)"
    r"|srun: error: ([\w.-]+):|peer ([\w.-]+)<",
    "job": r"\*\*\* (?:JOB|STEP) ([\d.+_]+)|StepId=([\d.]+)",
    "at": r"CANCELLED AT (\S+)",
    "file": r"(?:No space left on device|quota exceeded|File too large): ['\"]([^'\"]+)",
    "GPU": r"Xid ?\(PCI:([\w:.]+)\)",
    "Xid": r"\bS?Xid\b(?: ?\([^)]*\))?:?(?: errors?)?:? ?(\d+)",
}
_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _FIELDS.items()}
_OF_A_COLLECTIVE = (
    "group", "sequence number", "operation", "elapsed", "timeout", "last enqueued",
    "last completed",
)  # fmt: skip
_OF_SLURM = ("job", "node", "at")
_OF_KIND = {
    "timeout": _OF_A_COLLECTIVE,
    "stuck": ("group", "elapsed"),
    "peer": ("node", "timeout"),
    "network": ("node",),
    "not_finite": ("iteration", "node"),
    "disk": ("file",),
    "files": ("file",),
    "hardware": ("Xid", "GPU"),
    "illegal": ("Xid", "GPU"),
    "crash": ("node",),
    "sigkill": ("node",),
    "killed": _OF_SLURM,
    "time_limit": _OF_SLURM,
    "preempted": _OF_SLURM,
    "node_lost": _OF_SLURM,
    "cancelled": _OF_SLURM,
}


def rank_in(sentence: str) -> int | None:
    """Return the rank that a sentence names, such as `[Rank 7]`."""
    match = _RANK.search(sentence)
    return None if match is None else int(match[1])


def details(kind: str, sentence: str) -> dict[str, str]:
    """Return what a sentence states that matters for its kind, with units, by its name."""
    stated = dict[str, str]()
    for name in _OF_KIND.get(kind, ()):
        match = _PATTERNS[name].search(sentence)
        if match is not None:
            stated[name] = _stated(name, match)
    return stated


def _stated(name: str, match: re.Match[str]) -> str:
    if name == "group":
        named = match["name"] or match["guid"]
        return f"{named} (ID {match['id']})" if named else str(match["id"])
    value = next(group for group in match.groups() if group)
    if name in ("elapsed", "timeout"):
        in_seconds = re.search(r"\d (?:s|sec\w*)\b|\ds\b", match[0]) is not None
        return f"{int(value) / (1 if in_seconds else 1000):,.0f} s"
    if name == "Xid" and int(value) in _XIDS:
        return f"{value} ({_XIDS[int(value)]})"
    return value


_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = r"([\d,]+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB|TiB|B\b)"
_OF_SIZES = {
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
_SIZES = {
    name: [re.compile(pattern, re.IGNORECASE) for pattern in patterns]
    for name, patterns in _OF_SIZES.items()
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
    known = {name: _first(sentence, patterns) for name, patterns in _SIZES.items()}
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
