# SPDX-License-Identifier: Apache-2.0
"""The page of `longhaul watch`, and its lines in a pipe."""

import itertools
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from longhaul.health.loss_checks import number
from longhaul.run_folder.run_view import RunView, StageView
from longhaul.run_folder.state import NONE_STARTED
from longhaul.terminal.pace import duration
from recipes.spec.finding import Finding

BARS = (
    "\N{LOWER ONE EIGHTH BLOCK}\N{LOWER ONE QUARTER BLOCK}\N{LOWER THREE EIGHTHS BLOCK}"
    "\N{LOWER HALF BLOCK}\N{LOWER FIVE EIGHTHS BLOCK}\N{LOWER THREE QUARTERS BLOCK}"
    "\N{LOWER SEVEN EIGHTHS BLOCK}\N{FULL BLOCK}"
)
IN_ASCII = "_.-:=+*#"
SPARKS = 40
"""Columns of the curve of the loss."""
GiB = 2**30
MOST_RANKS = 16
"""Ranks whose memory is shown one by one."""
PARTS = {
    "data_wait_seconds": "data",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "communication_seconds": "communication",
    "optimizer_seconds": "optimizer",
    "copy_seconds": "copies",
}
"""Parts of a step that metrics may have, and their names on the page."""


def sparkline(values: Sequence[float], width: int, bars: str) -> str:
    """Return a curve of some values: the mean of each of `width` parts of equal length."""
    if not values:
        return ""
    width = min(width, len(values))
    ends = [round(at * len(values) / width) for at in range(width + 1)]
    means = [sum(values[first:last]) / (last - first) for first, last in itertools.pairwise(ends)]
    low, high = min(means), max(means)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((mean - low) * scale)] for mean in means)


def figures(stage: StageView) -> dict[str, str]:
    """Return the figures of a stage's newest step by their names; those that are known."""
    line, state = stage.line, stage.state
    found = {"loss": f"{number(line, 'loss'):.3f}" if line else ""}
    rate = number(line, "tokens_per_second_per_rank")
    found["tokens/s/rank"] = f"{rate:,.0f}" if math.isfinite(rate) else ""
    mfu = number(line, "mfu")
    found["MFU"] = f"{mfu:.1%}" if math.isfinite(mfu) else ""
    seconds = number(line, "seconds")
    found["step"] = f"{seconds:,.2f} s" if math.isfinite(seconds) else ""
    found["split"] = step_split(line)
    found["memory"] = memory(line)
    if math.isfinite(stage.checkpoint_seconds):
        found["checkpoint"] = (
            f"step {state.checkpoint_step:,}, {duration(stage.checkpoint_seconds)} ago"
        )
    left = state.seconds_left
    found["left"] = duration(left) if math.isfinite(left) and left > 0 else ""
    return {name: words for name, words in found.items() if words}


def step_split(line: dict[str, Any]) -> str:
    """Return the shares of a step's time by part, those that its line has."""
    seconds = number(line, "seconds")
    shares = {
        words: number(line, key) / seconds
        for key, words in PARTS.items()
        if math.isfinite(number(line, key)) and seconds > 0
    }
    shown = [f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005]
    return (
        ", ".join(shown) if len(shares) > 1 else "".join(f"data {s:.1%}" for s in shares.values())
    )


def memory(line: dict[str, Any]) -> str:
    """Return the memory of the ranks, or of the fullest."""
    listed = line.get("device_memory_bytes_by_rank")
    if isinstance(listed, list) and len(listed) <= MOST_RANKS:
        return f"{' '.join(f'{each / GiB:.1f}' for each in listed)} GiB by rank"
    most = number(line, "device_memory_bytes")
    return f"{most / GiB:.1f} GiB on the fullest rank" if math.isfinite(most) else ""


def progress_of(stage: StageView) -> str:
    """Return the steps of a stage, of how many."""
    steps = f"{stage.state.steps:,.0f}" if math.isfinite(stage.state.steps) else "?"
    return f"{stage.state.step:,}/{steps}"


def finding_lines(name: str, finding: Finding) -> Iterator[str]:
    """Yield a finding in lines: what, since when, why, what to do."""
    where = f"{name}: " if name else ""
    yield f"{where}{finding.kind} since step {finding.step:,}: {finding.said}"
    if finding.cause:
        yield f"  likely cause: {finding.cause}"
    if finding.remedy:
        yield f"  to do: {finding.remedy}"


def page(view: RunView, console: Console) -> RenderableType:
    """Return the page of a run for a terminal."""
    bars = BARS if (console.encoding or "").lower().startswith("utf") else IN_ASCII
    state = view.state
    named = f"{state.card} on ladder {state.ladder}  " if state is not None and state.card else ""
    parts: list[RenderableType] = [Text(f"{named}{view.run}", style="bold", overflow="fold")]
    table = Table.grid(padding=(0, 2))
    for stage in view.stages:
        left = figures(stage).get("left", "") if stage.state.state != "done" else ""
        table.add_row(
            stage.state.name, stage.state.state, progress_of(stage), left and f"{left} left"
        )
    parts.append(table)
    if not view.stages and state is not None:
        parts.append(Text(NONE_STARTED, overflow="fold"))
    current = view.current
    if current is not None and current.line:
        shown = figures(current)
        curve = sparkline(current.losses, max(1, min(SPARKS, console.width - 20)), bars)
        detail = Table.grid(padding=(0, 2))
        for name, words in shown.items():
            detail.add_row(name, Text(f"{words}  {curve}" if name == "loss" else words))
        if math.isfinite(current.silent_seconds) and current.state.state == "running":
            detail.add_row("newest step", f"{duration(current.silent_seconds)} ago")
        parts += [Text(""), detail]
    found = [line for name, one in view.all_findings for line in finding_lines(name, one)]
    parts += [Text(""), Text("\n".join(found) or "no finding", overflow="fold")]
    past = sum(len(stage.past) for stage in view.stages)
    if past:
        listing = shlex.join(["longhaul", "doctor", "run", str(view.run)])
        parts.append(Text(f"{past} earlier; {listing} lists them"))
    if state is not None and state.trouble:
        parts.append(Text(f"broken: {state.trouble}", overflow="fold"))
    return Group(*parts)


class Changes:
    """The lines of a run in a pipe: one where something changes, and one from time to time."""

    def __init__(self, every_seconds: float) -> None:
        """Take the least time between two lines of progress."""
        self.every = every_seconds
        self._trouble = ""
        self._looked = False
        self._states: dict[str, str] = {}
        self._saved: dict[str, int | None] = {}
        self._steps: dict[str, int] = {}
        self._said = -math.inf
        self._findings: dict[tuple[str, Any], Finding] = {}

    def lines(self, view: RunView, now: float) -> Iterator[str]:
        """Yield what has changed since the last call."""
        trouble = "" if view.state is None else view.state.trouble
        if trouble and trouble != self._trouble:
            yield f"broken: {trouble}"
        self._trouble = trouble
        if not self._looked and not view.stages and view.state is not None:
            yield f"{view.run}: {NONE_STARTED}"
        self._looked = True
        for stage in view.stages:
            name, state = stage.state.name, stage.state
            if self._states.get(name) != state.state:
                is_said = state.state == "broken"  # by its finding
                reason = f": {state.reason}" if state.reason and not is_said else ""
                shown = f"  {self._figures(stage)}" if name not in self._states else ""
                yield f"{name}  {state.state}  step {progress_of(stage)}{shown}{reason}".rstrip()
                self._states[name] = state.state
                self._saved.setdefault(name, state.checkpoint_step)
                self._steps.setdefault(name, state.step)
            if self._saved.get(name) != state.checkpoint_step:
                yield f"{name}  saved step {state.checkpoint_step}"
                self._saved[name] = state.checkpoint_step
            moved = state.step != self._steps.get(name)
            if moved and (now - self._said >= self.every or state.step >= state.steps):
                yield f"{name}  step {progress_of(stage)}  {self._figures(stage)}"
                self._steps[name], self._said = state.step, now
        current = {(name, each.key): each for name, each in view.all_findings}
        for key, finding in current.items():
            if key not in self._findings:
                yield from finding_lines(key[0], finding)
        for key, finding in self._findings.items():
            if key not in current:
                yield f"{key[0] or view.run}: {finding.kind} has ended"
        self._findings = current

    @staticmethod
    def _figures(stage: StageView) -> str:
        shown = figures(stage)
        shown.pop("memory", None)
        return "  ".join(f"{name} {words}" for name, words in shown.items())


def content(view: RunView) -> dict[str, Any]:
    """Return a look at a run for programs."""
    return {
        "run": str(view.run),
        "is_at_work": view.is_at_work,
        "trouble": "" if view.state is None else view.state.trouble,
        "readable": not any(one.kind == "folder_lost" for one in view.findings),
        "stages": [
            {
                "name": stage.state.name,
                "state": stage.state.state,
                "reason": stage.state.reason,
                "step": stage.state.step,
                "steps": stage.state.steps,
                "seconds_left": stage.state.seconds_left,
                "checkpoint_step": stage.state.checkpoint_step,
                "checkpoint_age_seconds": stage.checkpoint_seconds,
                "silent_seconds": stage.silent_seconds,
                "newest": stage.line,
                "findings": [finding.content() for finding in stage.findings],
                "past_findings": [finding.content() for finding in stage.past],
            }
            for stage in view.stages
        ],
        "findings": [finding.content() for finding in view.findings],
    }
