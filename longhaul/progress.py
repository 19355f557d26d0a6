# SPDX-License-Identifier: Apache-2.0
"""One line of progress for the stage that runs, read from the metrics it writes."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

POLL_SECONDS = 0.5
PLAIN_EVERY_SECONDS = 20.0
"""Time between two lines where the output is no terminal."""


@dataclass(frozen=True)
class Watched:
    """Name a job, its steps, and the metrics file it appends to."""

    name: str
    steps: int
    metrics: Path


def last_line(metrics: Path) -> dict[str, Any] | None:
    """Return the newest whole line of a metrics file, None where there is none."""
    try:
        lines = metrics.read_bytes().splitlines(keepends=True)
    except OSError:
        return None
    for line in reversed(lines[-2:]):
        if line.endswith(b"\n"):
            try:
                content = json.loads(line)
            except ValueError:
                continue
            return content if isinstance(content, dict) else None
    return None


@contextmanager
def progress(console: Console, jobs: Sequence[Watched], after: str = "") -> Iterator[None]:
    """Show the jobs' progress on the console until the context ends, then what comes `after`."""
    done = threading.Event()
    show = _bars if console.is_terminal else partial(_lines, {j.name: _step(j) for j in jobs})
    thread = threading.Thread(target=show, args=(console, jobs, done, after), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _figures(line: dict[str, Any]) -> str:
    return (
        f"loss {line['loss']:.3f}  lr {line['lr']:.1e}  "
        f"{line['tokens_per_second_per_rank']:,.0f} tokens/s/rank"
    )


def _all_ended(jobs: Sequence[Watched]) -> bool:
    return all(_step(job) >= job.steps for job in jobs)


def _bars(console: Console, jobs: Sequence[Watched], done: threading.Event, after: str) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks = [
            bars.add_task(job.name, total=job.steps, figures="", start=False, visible=False)
            for job in jobs
        ]
        ended = False
        while not ended:
            ended = done.wait(POLL_SECONDS)
            for job, task in zip(jobs, tasks, strict=True):
                line = last_line(job.metrics)
                if line is None:
                    continue
                if not bars.tasks[task].started:
                    bars.start_task(task)
                bars.update(task, completed=line["step"], figures=_figures(line), visible=True)
                if line["step"] >= job.steps:
                    bars.stop_task(task)
            if after and _all_ended(jobs):
                bars.console.print(after)
                after = ""


def _lines(
    shown: dict[str, int],
    console: Console,
    jobs: Sequence[Watched],
    done: threading.Event,
    after: str,
) -> None:
    ended, waited = False, 0.0
    while not ended:
        ended = done.wait(POLL_SECONDS)
        waited += POLL_SECONDS
        for job in jobs:
            line = last_line(job.metrics)
            if line is None or line["step"] == shown[job.name]:
                continue
            if waited >= PLAIN_EVERY_SECONDS or line["step"] >= job.steps:
                console.print(f"{job.name}  {line['step']}/{job.steps}  {_figures(line)}")
                shown[job.name] = line["step"]
                waited = 0.0
        if after and _all_ended(jobs):
            console.print(after)
            after = ""


def _step(job: Watched) -> int:
    line = last_line(job.metrics)
    return 0 if line is None else int(line["step"])
