# SPDX-License-Identifier: Apache-2.0
"""Facts in the sentence of a fault: rank, group, collective, iteration, job, file."""

import re

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
