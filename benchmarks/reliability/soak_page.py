# SPDX-License-Identifier: Apache-2.0
"""The page of a soak, from the lines that it wrote each minute and after each turn."""

import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write

SAMPLES = "samples.jsonl"
SETTLED_MINUTES = 10
MOST_GROWTH = 0.02
"""Of the median of some minutes."""
MOST_AT_ONCE = 0.10
"""Of a single minute, over that median: a rank holds more during a step or a save."""
CACHES = ("torchinductor_",)
"""Folders of a library's cache, in the folder of temporary files: made once, and meant to stay."""
COUNTS = ("threads", "files", "sockets", "pipes", "children")

Line = dict[str, Any]


def lines_of(folder: Path) -> list[Line]:
    """Return the lines of a soak, which may still be running."""
    return [json.loads(line) for line in (folder / SAMPLES).read_text().splitlines()]


def settled(minutes: Sequence[Line]) -> list[Line]:
    """Return the lines from the tenth minute on, all of them if there are fewer."""
    return [line for line in minutes if line["minute"] >= SETTLED_MINUTES] or list(minutes)


def idle_minutes(turns: Sequence[Line]) -> int:
    """Return how many minutes at the end have one between two turns: a turn holds more."""
    last = turns[-1]["seconds"] / 60 if turns else 0
    return max(SETTLED_MINUTES, math.ceil(last) + 3)


def grew(name: str, minutes: Sequence[Line], tail: int = SETTLED_MINUTES) -> Iterator[str]:
    """Yield what a long-lived process has more of at the end than when it had settled."""
    of = [line["processes"][name] for line in settled(minutes)]
    before, after = medians(of, tail)
    most = max(each["unshared"] for each in of)
    if after > before * (1 + MOST_GROWTH) or most > before * (1 + MOST_AT_ONCE):
        yield "memory"
    for kind, (before, after) in counts(of, tail).items():
        if after > before:
            yield kind


def ends(
    of: Sequence[dict[str, int]], tail: int
) -> tuple[Sequence[dict[str, int]], Sequence[dict[str, int]]]:
    """Return the first ten and the last `tail` minutes, at most a third of all each."""
    third = max(1, len(of) // 3)
    return of[: min(SETTLED_MINUTES, third)], of[-min(tail, third) :]


def medians(of: Sequence[dict[str, int]], tail: int) -> tuple[float, float]:
    """Return the median unshared bytes of the first ten and of the last `tail` minutes.

    A rank holds a few percent more during a step than after one, wherever a sample falls.
    """
    before, after = (
        statistics.median(each["unshared"] for each in part) for part in ends(of, tail)
    )
    return before, after


def counts(of: Sequence[dict[str, int]], tail: int) -> dict[str, tuple[int, int]]:
    """Return the smallest of each count in the first ten and the last `tail` minutes."""
    before, after = ends(of, tail)
    return {
        kind: (min(each[kind] for each in before), min(each[kind] for each in after))
        for kind in COUNTS
    }


def process_row(name: str, minutes: Sequence[Line], tail: int = SETTLED_MINUTES) -> list[str]:
    """Return the row of a long-lived process."""
    of = [line["processes"][name] for line in settled(minutes)]
    first, last = of[0], of[-1]
    before, after = medians(of, tail)
    changes = [each["unshared"] / before - 1 for each in of]
    return [
        name, "", f"{first['resident'] / 2**20:,.0f} / {last['resident'] / 2**20:,.0f}",
        f"{before / 2**20:,.1f} / {after / 2**20:,.1f}",
        f"{min(changes):+.2%}", f"{max(changes):+.2%}", f"{after / before - 1:+.2%}",
        *(f"{before} / {after}" for before, after in counts(of, tail).values()),
        ", ".join(grew(name, minutes, tail)) or "nothing",
    ]  # fmt: skip


def turn_rows(turns: Sequence[Line]) -> list[list[str]]:
    """Return a row for each kind of turn."""
    rows = []
    for by, what in (("loop", "`longhaul rehearse`, in the loop"), ("command", "`longhaul run`")):
        of = [turn for turn in turns if turn["by"] == by]
        left = [
            str(len([each for each in leaks(of) if f": {kind} left: " in each]))
            for kind in ("processes", "files", "names")
        ]
        seconds = sorted(turn["seconds"] for turn in of)
        middle = f"{seconds[len(seconds) // 2]:.0f}" if seconds else "-"
        rows.append([what, "", str(len(of)), middle, *left])
    return rows


def leaks(lines: Sequence[Line]) -> list[str]:
    """Return a line for each thing that a turn, or the end, left behind."""
    found = []
    for line in lines:
        where = f"turn {line['turn']} by {line['by']}" if "turn" in line else "the end"
        for kind in ("processes_left", "files_left", "names_left"):
            found += [
                f"* {where}: {kind.replace('_', ' ')}: {each}"
                for each in line.get(kind, [])
                if not any(Path(part).name.startswith(CACHES) for part in Path(each).parts)
            ]
    return found


def page_of(folder: Path) -> tuple[str, bool]:
    """Return the page, and whether the claim holds."""
    lines = lines_of(folder)
    minutes = [line for line in lines if "processes" in line]
    turns = [line for line in lines if "turn" in line]
    end = [line for line in lines if "end" in line]
    names = list(minutes[0]["processes"])
    left, tail = leaks(lines), idle_minutes(turns)
    growing = [name for name in names if list(grew(name, minutes, tail))]
    shared = settled(minutes)
    head = [
        "process", "", "resident MiB", "unshared MiB", "least", "most", "grew by", *COUNTS, "grew",
    ]  # fmt: skip
    temporary = f"{shared[0]['temporary_files']} / {shared[-1]['temporary_files']}"
    holds = not left and not growing and bool(end)
    sections = [
        f"{minutes[-1]['minute']:.0f} minutes, {len(turns)} turns of the loop"
        + ("" if end else "; **the soak has not ended**")
        + f". The claim {'holds' if holds else 'does not hold'}: after {SETTLED_MINUTES} minutes "
        f"the median memory grows by at most {MOST_GROWTH:.0%} and no minute has more than "
        f"{MOST_AT_ONCE:.0%} over it, and nothing is left.",
        f"Long-lived processes at minute {shared[0]['minute']:.0f} / {shared[-1]['minute']:.0f}. "
        f"Unshared memory is the median of the first {SETTLED_MINUTES} of these minutes and of "
        f"the last {tail} (of a third each in a short soak). The claim compares these two, since "
        "a rank holds more during a step. The least and the most minute are compared with the "
        "first of them. Resident memory also "
        "has pages of libraries, which the kernel drops when others need the memory. The fork "
        "server shares its own with the ranks while these run. Counts are the smallest of the "
        "same minutes, which have one between two turns.",
        table(head, [process_row(name, minutes, tail) for name in names]),
        f"Temporary files at both minutes: {temporary}; named semaphores "
        f"{shared[0]['semaphores']} / {shared[-1]['semaphores']}, shared-memory segments "
        f"{shared[0]['segments']} / {shared[-1]['segments']}.",
        "What turns left behind:",
        table(
            [
                "turns",
                "",
                "number",
                "seconds, median",
                "processes",
                "files",
                "semaphores, segments",
            ],
            turn_rows(turns),
        ),
        *left,
    ]
    if end:
        sections.append(
            f"At the end the training was interrupted and ended with code {end[0]['exit_code']}, "
            "the loop by the end of its input."
        )
    known = {"load over a minute": f"{os.getloadavg()[0]:.1f}"}
    stated = facts(("nemo-toolkit", "megatron-core", "psutil")) | known
    return page("A soak of training", stated, sections), holds


def write_page(text: str, folder: Path, out: Path | None) -> None:
    """Print the page, and write it into the folder and where asked to."""
    write(folder / "page.md", text)
    if out is not None:
        write(out, text)
    sys.stdout.write(text)
