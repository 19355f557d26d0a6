# SPDX-License-Identifier: Apache-2.0
"""Progress of the stage that runs and of its ladder, read from the metrics that stages write."""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from longhaul.facts import amount
from longhaul.messages import is_quiet
from longhaul.pace import Pace, Part, duration, ladder_left, last_lines

POLL_SECONDS = 0.5
PLAIN_EVERY_SECONDS = 20.0
"""Time between two lines where the output is no terminal."""
WIDE = 110
"""Columns of a terminal that have room for a bar and all figures."""


@dataclass(frozen=True)
class Watched:
    """Name a job, its steps, the metrics file it appends to, and the tokens of a step."""

    name: str
    steps: int
    metrics: Path
    tokens_per_step: int = 0


@contextmanager
def progress(console: Console, jobs: Sequence[Watched], after: str = "") -> Iterator[None]:
    """Show the jobs' progress on the console until the context ends, then what comes `after`."""
    if is_quiet():
        yield
        return
    done = threading.Event()
    shown = _Bars(console, jobs) if console.is_terminal else _Lines(console, jobs)
    thread = threading.Thread(target=_watch, args=(shown, jobs, done, after), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _watch(
    shown: "_Bars | _Lines", jobs: Sequence[Watched], done: threading.Event, after: str
) -> None:
    """Show what has changed until it is done, and then once more."""
    with shown:
        ended = False
        while not ended:
            ended = done.wait(POLL_SECONDS)
            lines = [last_lines(job.metrics) for job in jobs]
            shown.show(lines)
            steps = [each[-1]["step"] if each else 0 for each in lines]
            if after and all(step >= job.steps for step, job in zip(steps, jobs, strict=True)):
                shown.say(after)
                after = ""


def figures(line: dict[str, Any], *, short: bool = False) -> str:
    """Return the figures of a step; `short` leaves out the rate and what a rank reads."""
    loss = line.get("loss")
    words = f"loss {loss:.3f}" if isinstance(loss, int | float) else "loss -"
    if short or "lr" not in line:
        return words
    return f"{words}  lr {line['lr']:.1e}  {line['tokens_per_second_per_rank']:,.0f} tokens/s/rank"


def time_left(jobs: Sequence[Watched], lines: Sequence[list[dict[str, Any]]], at: int) -> str:
    """Return how long one job still takes, and all of them where there are more."""
    parts = [
        Part(job.steps, job.tokens_per_step or math.nan, Pace.of(each))
        for job, each in zip(jobs, lines, strict=True)
    ]
    this = parts[at].pace.left(jobs[at].steps)
    words = f"{duration(this)} left" if math.isfinite(this) and this > 0 else ""
    whole = ladder_left(parts)
    if words and len(jobs) > 1 and math.isfinite(whole) and whole > this:
        words += f", about {duration(whole)} with all stages"
    return words


def tokens_done(job: Watched, step: int) -> str:
    """Return the tokens that a job has read, empty where those of a step are not said."""
    return f"{amount(step * job.tokens_per_step)} tokens" if job.tokens_per_step else ""


class _Bars:
    """A bar for each job that has begun."""

    def __init__(self, console: Console, jobs: Sequence[Watched]) -> None:
        self.jobs, self.wide = jobs, console.width >= WIDE
        bar: list[ProgressColumn] = [BarColumn(bar_width=20)] if self.wide else []
        columns = (
            TextColumn("{task.description}"),
            *bar,
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[figures]}"),
            *([TimeElapsedColumn()] if self.wide else []),
        )
        # The ranks' output is redirected by descriptor: rich must not replace sys.stderr.
        self.bars = Progress(
            *columns, console=console, redirect_stdout=False, redirect_stderr=False
        )
        self.tasks = [
            self.bars.add_task(job.name, total=job.steps, figures="", start=False, visible=False)
            for job in jobs
        ]

    def __enter__(self) -> "_Bars":
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def say(self, text: str) -> None:
        self.bars.console.print(text)

    def show(self, lines: Sequence[list[dict[str, Any]]]) -> None:
        for at, (job, task) in enumerate(zip(self.jobs, self.tasks, strict=True)):
            if not lines[at]:
                continue
            line, step = lines[at][-1], lines[at][-1]["step"]
            if not self.bars.tasks[task].started:
                self.bars.start_task(task)
            words = (
                figures(line, short=not self.wide),
                tokens_done(job, step),
                time_left(self.jobs, lines, at),
            )
            self.bars.update(
                task, completed=step, figures="  ".join(filter(None, words)), visible=True
            )
            if step >= job.steps:
                self.bars.stop_task(task)


class _Lines:
    """Now and then a line, and one at the end of each job."""

    def __init__(self, console: Console, jobs: Sequence[Watched]) -> None:
        self.console, self.jobs, self.waited = console, jobs, 0.0
        self.shown = {job.name: Pace.of(last_lines(job.metrics)).step for job in jobs}

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        self.console.print(text)

    def show(self, lines: Sequence[list[dict[str, Any]]]) -> None:
        self.waited += POLL_SECONDS
        for at, job in enumerate(self.jobs):
            if not lines[at] or lines[at][-1]["step"] == self.shown[job.name]:
                continue
            line, step = lines[at][-1], lines[at][-1]["step"]
            if self.waited < PLAIN_EVERY_SECONDS and step < job.steps:
                continue
            words = (
                f"{job.name}  {step}/{job.steps}",
                figures(line),
                tokens_done(job, step),
                time_left(self.jobs, lines, at),
            )
            self.console.print("  ".join(filter(None, words)), highlight=False, soft_wrap=True)
            self.shown[job.name] = step
            self.waited = 0.0
