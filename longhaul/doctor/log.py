# SPDX-License-Identifier: Apache-2.0
"""`longhaul doctor log`: which faults a log tells of, the earliest cause first."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from longhaul.doctor.logs.kinds import ON_THE_GPU, ON_THE_HOST
from longhaul.doctor.logs.reader import Fault, Log, read
from longhaul.options import Json, print_json
from recipes.spec.naming import counted

LONGEST = 400
"""Characters of a line that are shown."""


def log(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="Output of a rank or of a job, of any program; or /dev/stdin."
        ),
    ],
    as_json: Json = False,
) -> None:
    """Say which faults logs tell of, the earliest cause first, and what to do."""
    found = read(files)
    if as_json:
        print_json(content(found))
        return
    typer.echo("\n".join(describe(found)))


def describe(
    log: Log,
    run: Path | None = None,
    meaning: Callable[[Fault], Sequence[str]] = lambda fault: (),
) -> Iterator[str]:
    """Yield what a log tells, in lines of text.

    `run` is the run folder that the log is of; `meaning` returns what more is known of a fault
    than what to do in general.
    """
    told = content(log)
    several = len({fault.log for fault in log.faults}) > 1
    for fault, of in zip(log.faults, told["faults"], strict=True):
        relation = "" if fault is log.faults[0] else f"{of['relation']}: "
        place = f"{fault.log}: " if several else ""
        times = f", {fault.count:,} times" if fault.count > 1 else ""
        yield f"{relation}{place}line {fault.number:,}{_by(fault)}{times}: {of['what']}"
        yield f"  {_cut(fault.line)}"
        if fault.details:
            yield "  " + ", ".join(f"{name} {value}" for name, value in fault.details.items())
        if of["relation"] != "follows from it":
            yield from (f"  {line}" for line in meaning(fault) or _to_do(fault, run))
    if log.faults:
        return
    if log.empty:
        yield "the log is empty; is it the log of the rank that failed first?"
    elif log.binary:
        yield "the log is not text; name the output of a rank or of a job"
    else:
        yield f"no known fault in {counted(log.lines, 'line')}"
        if log.error_like:
            yield "the last lines that look like an error:"
            yield from (f"  line {one.number:,}: {_cut(one.text)}" for one in log.error_like)
        else:
            yield "no line looks like an error: the output of another rank, or Slurm's, may have it"


def content(log: Log) -> dict[str, Any]:
    """Return what a log tells for JSON; sizes in bytes."""
    return {
        "lines": log.lines,
        "faults": [
            {
                "kind": fault.kind,
                "what": fault.known.what,
                "relation": fault.relation(log.faults[0]) or "first cause",
                "log": fault.log,
                "line_number": fault.number,
                "line": fault.line,
                "count": fault.count,
                "ranks": list(fault.ranks),
                "details": fault.details,
                "asked_bytes": fault.sizes.asked,
                "remedy": fault.known.remedy,
                "command": fault.known.more or None,
            }
            for fault in log.faults
        ],
        "error_like": [{"line_number": line.number, "line": line.text} for line in log.error_like],
    }


def memory_ran_out(log: Log) -> tuple[Fault, ...]:
    """Return the faults that are of memory, of a GPU or of the host."""
    return log.of((*ON_THE_GPU, *ON_THE_HOST))


def _to_do(fault: Fault, run: Path | None) -> Iterator[str]:
    yield fault.known.remedy
    if fault.known.more:
        more = fault.known.more.replace("FILE", shlex.quote(fault.log or "FILE"))
        yield more if run is None else more.replace("RUN", shlex.quote(str(run)))


def _by(fault: Fault) -> str:
    """Return the ranks that wrote a fault, neighbours as one range."""
    if not fault.ranks:
        return ""
    of_ranges = groupby(enumerate(fault.ranks), key=lambda one: one[1] - one[0])
    ranges = [[rank for _, rank in group] for _, group in of_ranges]
    named = ", ".join(f"{one[0]}-{one[-1]}" if len(one) > 1 else str(one[0]) for one in ranges)
    return f", rank{'s' if len(fault.ranks) > 1 else ''} {_cut(named)}"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
