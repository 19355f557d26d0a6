# SPDX-License-Identifier: Apache-2.0
"""The faults of one or several logs: the earliest cause first, then what follows from it."""

import glob
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from longhaul.doctor.logs.kinds import BY_NAME, ERROR_LIKE, KINDS, ON_THE_GPU, ON_THE_HOST, Kind
from longhaul.doctor.logs.lines import Line, Lines, Suspect
from longhaul.doctor.logs.stated import Sizes, details, rank_in, sizes

TRACEBACK = 10
"""Lines of a traceback between a call that locks host memory and CUDA's error on it."""
SHOWN = 5
"""Error-like lines that are kept of a log."""
BEFORE, AFTER = 400, 1600
"""Characters of a line that are kept on each side of where it tells of its fault."""
_HINTS = tuple((hint, kind.name) for kind in KINDS for hint in kind.hints)
_PINS = re.compile(r"pin_memory|pin memory thread|\bcudaHostAlloc\b|\bcudaHostRegister\b")
"""A call that locks host memory. CUDA reports its failure as it does that of GPU memory."""
_STAMP = re.compile(r"\[[EWF](\d{3,4}) (\d\d:\d\d:\d\d\.\d+)")
_FOLLOWS = {
    "hardware": ("illegal", "assertion", "library"),
    "assertion": ("illegal", "library"),
    "illegal": ("library",),
    "device": ("library", "nccl_memory"),
    "host": ("killed",),
    "disk": ("files",),
}
"""Causes that another one brings about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What tells of one kind of fault; of several lines the first, or the one that asks most."""

    kind: str
    line: str
    number: int
    """The number of its line."""
    log: str = ""
    """The file of it."""
    count: int = 1
    """Number of occurrences."""
    ranks: tuple[int, ...] = ()
    """Ranks that wrote it."""
    details: dict[str, str] = field(default_factory=dict)
    sizes: Sizes = Sizes()

    @property
    def known(self) -> Kind:
        """What is known of its kind."""
        return BY_NAME[self.kind]

    def relation(self, first: "Fault") -> str:
        """Return how it is related to the first cause; empty for that one."""
        if self is first:
            return ""
        later = self.known.depth > first.known.depth or first.known.depth == self.known.depth == 1
        if self.kind in _FOLLOWS.get(first.kind, ()) or (later and first.known.ends):
            return "follows from it"
        return "may follow from it" if later else "apart from it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """What one or several logs tell."""

    faults: tuple[Fault, ...] = ()
    """One of each kind, the earliest cause first."""
    error_like: tuple[Line, ...] = ()
    """The last lines with a word of an error."""
    lines: int = 0
    empty: bool = False
    """Whether it has nothing but white space."""
    binary: bool = False
    """Whether its beginning has NUL bytes."""

    def of(self, kinds: Sequence[str]) -> tuple[Fault, ...]:
        """Return the faults of some kinds, by their lines."""
        chosen = (fault for fault in self.faults if fault.kind in kinds)
        return tuple(sorted(chosen, key=lambda fault: fault.number))


def read(paths: Sequence[Path]) -> Log:
    """Return what logs tell; raise ValueError if one is not a file."""
    logs = []
    for path in paths:
        if path.is_dir() or not path.exists():
            raise ValueError(
                f"log {path} is not a file; name the output of a rank or of a job. `longhaul "
                "doctor run RUN` reads the logs of a run"
            )
        with path.open("rb") as file:
            logs.append(read_stream(file, str(path)))
    faults = merged(fault for log in logs for fault in log.faults)
    return Log(
        faults=tuple(faults),
        error_like=tuple(line for log in logs for line in log.error_like)[-SHOWN:],
        lines=sum(log.lines for log in logs),
        empty=all(log.empty for log in logs),
        binary=any(log.binary for log in logs),
    )


def logs_of(run: Path, stage: str) -> list[Path]:
    """Return the newest output of a stage's job in a run folder: of its ranks, Slurm and NCCL.

    With `--debug-comm` NCCL writes to files of the stage's folder; those of earlier jobs are older
    than the folder of the newest.
    """
    patterns = ("combined.log", "log-*.out", "sbatch_*.out")
    newest, began = list[Path](), 0.0
    for job in run.glob(f"launch/experiments/*/*/{glob.escape(stage)}"):
        logs = (sorted(job.rglob(one), key=_written) for one in patterns)
        of_job = [one[-1] for one in logs if one]
        if _newest(of_job) > _newest(newest):
            newest, began = of_job, _written(job)
    of_nccl = sorted((run / "stages" / stage).glob("nccl_*.log"))
    return newest + [path for path in of_nccl if _written(path) >= began]


def _written(path: Path) -> float:
    return path.stat().st_mtime


def _newest(paths: list[Path]) -> float:
    return max(map(_written, paths), default=0.0)


def read_text(text: str) -> Log:
    """Return what the text of a log tells."""
    return read_stream(io.BytesIO(text.encode()))


def read_stream(file: BinaryIO, name: str = "") -> Log:
    """Return what an open log tells; it is read once, some thousand lines at a time."""
    lines = Lines(_HINTS, ERROR_LIKE, SHOWN)
    faults = merged(_faults(lines.suspects(file), name))
    return Log(
        faults=tuple(faults), error_like=tuple(lines.error_like), lines=lines.count,
        empty=lines.blank, binary=lines.binary,
    )  # fmt: skip


def merged(faults: Iterator[Fault]) -> list[Fault]:
    """Return one fault of each kind, the earliest cause first."""
    kinds = dict[str, Fault]()
    for fault in faults:
        before = kinds.get(fault.kind)
        if before is None:
            kinds[fault.kind] = fault
            continue
        shown, other = before, fault
        if (fault.sizes.asked or 0.0) > (before.sizes.asked or 0.0) or _earlier(fault, before):
            shown, other = fault, before
        kinds[fault.kind] = replace(
            shown,
            count=before.count + fault.count,
            ranks=before.ranks if set(fault.ranks) <= set(before.ranks)
            else tuple(sorted({*before.ranks, *fault.ranks})),
            details=other.details | shown.details if fault.ranks == before.ranks
            else shown.details,
        )  # fmt: skip
    order = {kind: place for place, kind in enumerate(kinds)}
    return sorted(kinds.values(), key=lambda fault: (fault.known.depth, order[fault.kind]))


def _earlier(fault: Fault, than: Fault) -> bool:
    """Return whether a fault has an earlier time of day in front of it."""
    stamps = _STAMP.search(fault.line), _STAMP.search(than.line)
    return all(stamps) and stamps[0].groups() < stamps[1].groups()  # type: ignore[union-attr]


def _faults(suspects: Iterator[Suspect], name: str) -> Iterator[Fault]:
    pins, past = -TRACEBACK, 0
    for suspect in suspects:
        line = suspect.lines[0]
        if _PINS.search(line.text):
            pins = line.number
        told = _fault(suspect) if line.number > past else None  # a sentence is read once
        if told is None:
            continue
        fault, past = told
        of_host = fault.kind == "device" and not fault.sizes.known
        pinned = of_host and line.number - pins < TRACEBACK
        yield replace(fault, log=name, kind="pinned" if pinned else fault.kind)


def _fault(suspect: Suspect) -> tuple[Fault, int] | None:
    """Return the fault that a suspect tells of, and the number of the last line that was read.

    A line is read alone, then with the lines that continue it.
    """
    line, kinds = suspect.lines[0], [kind for kind in KINDS if kind.name in suspect.kinds]
    texts = [_joined(suspect.lines[:1]), _joined(suspect.lines), _joined(suspect.lines, "")]
    matches = (
        (text, kind, kind.pattern.search(text))
        for follows in (False, True)  # a cause that is named further on explains the sentence
        for text in texts
        for kind in kinds
        if (kind.depth > 0) == follows
    )
    text, kind, match = next((one for one in matches if one[2]), ("", None, None))
    if kind is None or match is None:
        return None
    memory = kind.name in (*ON_THE_GPU, *ON_THE_HOST)
    of_texts = [sizes(_one_request(one)) for one in texts] if memory else [Sizes()]
    best = max(of_texts, key=lambda one: one.known)
    alone, spaced, glued = (details(kind.name, one) for one in texts)
    stated = spaced | alone | glued
    is_more = best.known > of_texts[0].known or stated != alone
    if text == texts[0] and is_more:
        text = _one_request(texts[1])
    rank = rank_in(text) if line.rank is None else line.rank
    return Fault(
        kind=kind.name, line=text[max(0, match.start() - BEFORE) : match.end() + AFTER],
        number=line.number, ranks=() if rank is None else (rank,), details=stated, sizes=best,
    ), suspect.lines[-1].number if is_more or text != texts[0] else line.number  # fmt: skip


def _joined(lines: Sequence[Line], glue: str = " ") -> str:
    return " ".join(glue.join(line.text for line in lines).split())


def _one_request(text: str) -> str:
    """Return a text up to the second request of memory in it."""
    requests = list(re.finditer("tried to allocate", text, re.IGNORECASE))
    return text[: requests[1].start()] if len(requests) > 1 else text
