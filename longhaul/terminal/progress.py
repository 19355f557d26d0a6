# SPDX-License-Identifier: Apache-2.0
"""Progress of the running stage and of its ladder, read from the metrics that stages write."""

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from longhaul.terminal.console import width_of
from longhaul.terminal.messages import is_quiet
from longhaul.terminal.pace import Pace, Part, duration, ladder_left, last_lines
from recipes.spec.finding import RecordTail
from recipes.spec.naming import amount

POLL_SECONDS = 0.5
PLAIN_EVERY_SECONDS = 20.0
"""Time between two lines if the output is not a terminal."""
EXPENDABLE = ("bar", "rate", "elapsed", "ladder", "tokens", "loss")
"""Parts that the lines on a terminal leave out, in this order, until they fit its width."""


@dataclass(frozen=True)
class Watched:
    """A job by name, with its steps, the metrics file it appends to, and the tokens of a step."""

    name: str
    steps: int
    metrics: Path
    tokens_per_step: int = 0


@contextmanager
def progress(console: Console, jobs: Sequence[Watched], after: str = "") -> Iterator[None]:
    """Show the jobs' progress on the console; print `after` once all of them have their steps."""
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
    """Show changes and findings of health until `done` is set, and then once more."""
    records = [RecordTail(job.metrics.parent) for job in jobs]
    with shown:
        ended = False
        while not ended:
            ended = done.wait(POLL_SECONDS)
            for job, record in zip(jobs, records, strict=True):
                for words in findings(record):
                    shown.say(f"warning: {job.name}: {words}")
            lines = [last_lines(job.metrics) for job in jobs]
            shown.show(lines)
            steps = [each[-1]["step"] if each else 0 for each in lines]
            if after and all(step >= job.steps for step, job in zip(steps, jobs, strict=True)):
                shown.say(after)
                after = ""


def findings(record: RecordTail) -> list[str]:
    """Return what has begun since the last call; what ends a training is its command's to say."""
    return [
        f"{line.get('said')}; {line.get('remedy') or line.get('cause')}"
        for line in record.poll()
        if line.get("state") == "begins" and line["kind"] not in ("failed", "folder_lost")
    ]


def rate(line: dict[str, Any]) -> str:
    """Return the learning rate of a step and its tokens per second and rank; empty without them."""
    if "lr" not in line:
        return ""
    return f"lr {line['lr']:.1e}  {line['tokens_per_second_per_rank']:,.0f} tokens/s/rank"


def time_left(jobs: Sequence[Watched], lines: Sequence[list[dict[str, Any]]], at: int) -> list[str]:
    """Return the time left for one job, and for all of them if that is longer."""
    parts = [
        Part(job.steps, job.tokens_per_step or math.nan, Pace.of(each))
        for job, each in zip(jobs, lines, strict=True)
    ]
    this = parts[at].pace.left(jobs[at].steps)
    if not (math.isfinite(this) and this > 0):
        return ["", ""]
    whole = ladder_left(parts)
    longer = len(jobs) > 1 and math.isfinite(whole) and whole > this
    return [
        f"{duration(this)} left", f", about {duration(whole)} with all stages" if longer else ""
    ]  # fmt: skip


def tokens_done(job: Watched, step: int) -> str:
    """Return the tokens that a job has read; empty if those of a step are unknown."""
    return f"{amount(step * job.tokens_per_step)} tokens" if job.tokens_per_step else ""


def figures(
    jobs: Sequence[Watched], lines: Sequence[list[dict[str, Any]]], at: int
) -> dict[str, str]:
    """Return the figures of a job next to its step, by the names in `EXPENDABLE`."""
    line = lines[at][-1]
    loss = line.get("loss")
    left, ladder = time_left(jobs, lines, at)
    return {
        "loss": f"loss {loss:.3f}" if isinstance(loss, int | float) else "loss -",
        "rate": rate(line),
        "tokens": tokens_done(jobs[at], line["step"]),
        "left": left,
        "ladder": ladder,
    }


def joined(said: dict[str, str], without: Sequence[str] = ()) -> str:
    """Return the figures of a job as a line of text."""
    kept = {name: "" if name in without else words for name, words in said.items()}
    words = (kept["loss"], kept["rate"], kept["tokens"], kept["left"] + kept["ladder"])
    return "  ".join(filter(None, words))


class _Fitting(Progress):
    """Lines with name, step and time left, and with as much of the rest as fits the terminal."""

    def __init__(self, console: Console) -> None:
        self.terminal = console  # rich makes the first table before it keeps the console
        # The ranks' output is redirected by descriptor: rich must not replace sys.stderr.
        super().__init__(console=console, redirect_stdout=False, redirect_stderr=False)

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        """Return the lines that fit with as few of EXPENDABLE left out as possible."""
        visible = [task for task in tasks if task.visible]
        tables = (_table(visible, EXPENDABLE[:count]) for count in range(len(EXPENDABLE) + 1))
        for table in tables:
            if width_of(self.terminal, table) <= self.terminal.width:
                break
        return table


def _table(tasks: Sequence[Task], without: Sequence[str]) -> Table:
    steps = [f"{task.completed:.0f}/{task.total:.0f}" for task in tasks]
    names = [task.description for task in tasks]
    bar = [] if "bar" in without else [Column(no_wrap=True)]
    elapsed = [] if "elapsed" in without else [Column(no_wrap=True)]
    table = Table.grid(
        Column(no_wrap=True, min_width=max(map(cell_len, names), default=0)),
        *bar,
        Column(no_wrap=True, min_width=max(map(len, steps), default=0)),
        Column(),  # the one that shrinks in an even narrower terminal
        *elapsed,
        padding=(0, 1),
    )
    for task, name, step in zip(tasks, names, steps, strict=True):
        said = joined(task.fields["figures"], without)
        table.add_row(
            Text(name),
            *([BarColumn(bar_width=20).render(task)] if bar else []),
            Text(step),
            Text(said, no_wrap=True, overflow="ellipsis"),
            *([TimeElapsedColumn().render(task)] if elapsed else []),
        )
    return table


_STARTING = {"loss": "no step yet", "rate": "", "tokens": "", "left": "", "ladder": ""}


class _Bars:
    """A line for each job that has started or is the next, with a bar where there is room."""

    def __init__(self, console: Console, jobs: Sequence[Watched]) -> None:
        self.jobs = jobs
        self.bars = _Fitting(console)
        self.tasks = [
            self.bars.add_task(job.name, total=job.steps, figures={}, start=False, visible=False)
            for job in jobs
        ]

    def __enter__(self) -> "_Bars":
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def say(self, text: str) -> None:
        self.bars.console.print(Text(text))

    def show(self, lines: Sequence[list[dict[str, Any]]]) -> None:
        for at, (job, task) in enumerate(zip(self.jobs, self.tasks, strict=True)):
            if not lines[at]:
                if at == 0 or self.bars.tasks[self.tasks[at - 1]].finished:
                    self.bars.update(task, figures=_STARTING, visible=True)
                continue
            step = lines[at][-1]["step"]
            if not self.bars.tasks[task].started:
                self.bars.start_task(task)
            said = figures(self.jobs, lines, at)
            self.bars.update(task, completed=step, figures=said, visible=True)
            if step >= job.steps:
                self.bars.stop_task(task)


class _Lines:
    """A line from time to time, and one at the end of each job."""

    def __init__(self, console: Console, jobs: Sequence[Watched]) -> None:
        self.console, self.jobs, self.waited = console, jobs, 0.0
        self.shown = {job.name: Pace.of(last_lines(job.metrics)).step for job in jobs}

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        self.console.print(Text(text))

    def show(self, lines: Sequence[list[dict[str, Any]]]) -> None:
        self.waited += POLL_SECONDS
        for at, job in enumerate(self.jobs):
            if not lines[at] or lines[at][-1]["step"] == self.shown[job.name]:
                continue
            step = lines[at][-1]["step"]
            if self.waited < PLAIN_EVERY_SECONDS and step < job.steps:
                continue
            said = joined(figures(self.jobs, lines, at))
            self.console.print(Text(f"{job.name}  {step}/{job.steps}  {said}"), soft_wrap=True)
            self.shown[job.name] = step
            self.waited = 0.0
