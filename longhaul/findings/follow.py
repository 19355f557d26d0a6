# SPDX-License-Identifier: Apache-2.0
"""State and findings of a run, once or until it ends; light.

A run cannot report its own death: no step is written, its processes, a node or its folder are gone.
A look adds that to what the run records. While a run is followed, durations are measured by the
clock of this process from the moment it saw a change, so that a clock that jumps, here or on the
machine that trains, changes none of them.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from longhaul.health.checks import findings
from longhaul.health.loss_checks import number
from longhaul.health.monitor import MetricsTail
from longhaul.health.thresholds import (
    FREE_BYTES,
    RECENT,
    SILENT_AT_START,
    SILENT_SECONDS,
    SILENT_STEPS,
)
from longhaul.run_folder.state import NONE_STARTED, RunState, StageState, run_state
from longhaul.terminal.pace import duration
from recipes.spec.finding import EVENTS, Finding, read, recorded
from recipes.spec.naming import counted, stage_folder

POLL_SECONDS = 2.0
POLL_SLURM_SECONDS = 15.0
"""Time between two looks; longer where each asks Slurm."""
LINE_SECONDS = 20.0
"""Time between two lines of a stage of which nothing but the step and its figures changes."""
IDLE_LOOKS = 2
"""Looks at a run that nothing works on after which it has ended: jobs follow one another."""
LONGEST_AGE = 30 * 86_400.0
"""Age of a file beyond which a clock is wrong."""
GiB = 2**30


class RunWatch:
    """Looks at a run again and again."""

    def __init__(self, run: Path, now: Callable[[], float] = time.monotonic) -> None:
        """Take the run, and the clock of durations."""
        self.run, self.now = run, now
        self._tails: dict[str, MetricsTail] = {}
        self._seen: dict[str, tuple[int, float]] = {}
        """The step of each stage, and when it was seen first."""
        self._last: RunState | None = None

    def look(self) -> RunState:
        """Return the run with its findings; raise ValueError on the first look if it is not one."""
        try:
            state = run_state(self.run)
            if self._last is not None and self._last.stages and not state.stages:
                raise ValueError("it has no stages any more")
        except (OSError, ValueError) as error:
            if self._last is None:
                raise
            return replace(self._last, findings=[_lost(self._last, error)])
        stages = [self._stage(stage) for stage in state.stages]
        self._last = replace(state, stages=stages, findings=_full(state))
        return self._last

    def _stage(self, stage: StageState) -> StageState:
        folder = stage_folder(self.run, stage.name)
        tail = self._tails.setdefault(stage.name, MetricsTail(folder / "metrics.jsonl"))
        tail.poll()
        lines = list(tail.lines)
        last = lines[-1]["step"] if lines else 0
        if stage.step < last and not last > stage.steps:  # written since the state was read
            stage = replace(stage, step=last)
        silent = self._silent(stage, tail.path)
        open_, past = recorded(read(folder))
        damage = [*_foreign(stage, last), *_garbled(stage, tail.garbled)]
        if stage.state == "done":
            found, past = damage, [*past, *open_]
        else:
            events = [one for one in past if one.kind in EVENTS and one.step >= last][-1:]
            found = [*open_, *events]
            kinds = {one.kind for one in found}
            found += [one for one in findings(lines) if one.kind not in kinds]
            known = kinds | (EVENTS | {"ended"} if events else set())
            observed = [*_died(stage), *_hangs(stage, lines, silent)]
            found += [*damage, *(one for one in observed if one.kind not in known)]
        past = [one for one in past if one not in found]
        return replace(stage, newest=tail.last, findings=found, past_findings=past)

    def _silent(self, stage: StageState, metrics: Path) -> float:
        """Return the seconds since the step changed; at the first look by the time of the file."""
        now = self.now()
        if stage.name not in self._seen:
            self._seen[stage.name] = stage.step, now - _file_age(metrics)
        elif self._seen[stage.name][0] != stage.step:
            self._seen[stage.name] = stage.step, now
        return now - self._seen[stage.name][1]


def follow(run: Path, show: Callable[[RunState, list[str]], None]) -> bool:
    """Show what changes until nothing works on the run; return whether all its stages are done."""
    watched, idle = RunWatch(run), 0
    shown: dict[str, tuple[str, Any, float]] = {}
    told: dict[tuple[str, Any], Finding] = {}
    while True:
        view = watched.look()
        lines: dict[str, tuple[str, Any]] = {
            stage.name: (stage_line(stage), (stage.state, stage.checkpoint_step, stage.reason))
            for stage in view.stages
        }
        lines |= {"trouble": (f"broken: {view.trouble}", None)} if view.trouble else {}
        lines = lines or {"none": (NONE_STARTED, None)}
        current = {(name, one.key): one for name, one in view.all_findings}
        changed, now = [], time.monotonic()
        for name, (line, state) in lines.items():
            last, before, since = shown.get(name, ("", None, -math.inf))
            if line != last and (state != before or now - since >= LINE_SECONDS):
                shown[name] = line, state, now
                changed.append(line)
        for (name, key), one in current.items():
            changed += [] if (name, key) in told else finding_lines(name, one)
        ended = [(name, one) for (name, key), one in told.items() if (name, key) not in current]
        changed += [f"{name or run}: {one.kind} has ended" for name, one in ended]
        if changed:
            show(view, changed)
        shown = {name: one for name, one in shown.items() if name in lines}
        told = current
        idle = 0 if view.is_at_work else idle + 1
        if idle >= IDLE_LOOKS:
            return bool(view.stages) and all(stage.state == "done" for stage in view.stages)
        time.sleep(POLL_SLURM_SECONDS if view.jobs else POLL_SECONDS)


def stage_line(stage: StageState) -> str:
    """Return the state of a stage and the figures of its newest step."""
    line, left = stage.newest, stage.seconds_left
    loss, rate = number(line, "loss"), number(line, "tokens_per_second_per_rank")
    memory = [f"{each / GiB:.1f}" for each in _each(line, "device_memory_bytes")]
    busy = [f"{each:.0f}" for each in _each(line, "gpu_utilization")]
    parts = [
        stage.name, stage.state, f"step {progress_of(stage)}",
        f"loss {loss:.3f}" if math.isfinite(loss) else "",
        f"tokens/s/rank {rate:,.0f}" if math.isfinite(rate) else "",
        f"memory {' '.join(memory)} GiB" if memory else "",
        f"GPUs busy {' '.join(busy)} %" if busy else "",
        f"saved step {stage.checkpoint_step:,}" if stage.checkpoint_step is not None else "",
        f"left {duration(left)}" if stage.state == "running" and math.isfinite(left) else "",
        "" if any(stage.reason in one.said for one in stage.findings) else stage.reason,
    ]  # fmt: skip
    return "  ".join(filter(None, parts))


def _each(line: Mapping[str, Any], key: str) -> list[float]:
    """Return a figure of each rank, or the one of all where ranks are too many to be listed."""
    listed = line.get(f"{key}_by_rank")
    values = listed if isinstance(listed, list) else [number(line, key)]
    return [value for value in values if math.isfinite(value)]


def progress_of(stage: StageState) -> str:
    """Return the steps of a stage, of how many."""
    return f"{stage.step:,}/{f'{stage.steps:,.0f}' if math.isfinite(stage.steps) else '?'}"


def finding_lines(name: str, finding: Finding) -> Iterator[str]:
    """Yield a finding in lines: what, since when, why, what to do."""
    where = f"{name}: " if name else ""
    yield f"{where}{finding.kind} since step {finding.step:,}: {finding.said}"
    if finding.cause:
        yield f"  likely cause: {finding.cause}"
    if finding.remedy:
        yield f"  to do: {finding.remedy}"


def _file_age(path: Path) -> float:
    """Return the age of a file; 0 without one, and where a clock is wrong."""
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
    return age if 0 <= age < LONGEST_AGE else 0.0


def _lost(last: RunState, error: Exception) -> Finding:
    """Return the finding that the folder is gone."""
    return Finding(
        kind="folder_lost", step=max((one.step for one in last.stages), default=0),
        said=f"{last.run} cannot be read: {' '.join(str(error).split())}",
        cause="the shared file system was unmounted or is down, or the folder was moved",
        remedy="mount it again; a run that ended meanwhile resumes by the same command",
    )  # fmt: skip


def _full(state: RunState) -> list[Finding]:
    """Return the finding that a file system has no room, while stages are left to be done."""
    try:
        free = shutil.disk_usage(state.run).free
    except OSError:
        return []
    if free >= FREE_BYTES or all(one.state == "done" for one in state.stages):
        return []
    return [
        Finding(
            kind="disk_full", step=max((one.step for one in state.stages), default=0),
            said=f"the file system of {state.run} has {free / 2**20:,.1f} MiB left",
            cause="checkpoints and logs of this or of other runs fill it",
            remedy="make room; a run that has ended resumes by the same command from its last "
            "complete checkpoint",
        )
    ]  # fmt: skip


def _foreign(stage: StageState, last: int) -> list[Finding]:
    """Return the finding that metrics are not of this stage: they have a step that it has not."""
    if not last > stage.steps:
        return []
    return [
        Finding(
            kind="foreign_metrics", step=last,
            said=f"metrics.jsonl has step {last:,}, and {stage.name} has {stage.steps:,.0f} steps",
            cause="the file is of another run or stage",
            remedy="put the stage's own file back, or move this one away; no checkpoint needs it",
        )
    ]  # fmt: skip


def _garbled(stage: StageState, lines: int) -> list[Finding]:
    """Return the finding that lines of the metrics have bytes that a run never writes."""
    if not lines:
        return []
    return [
        Finding(
            kind="damaged_metrics", step=stage.step,
            said="metrics.jsonl has NULs or bytes that are not UTF-8 in "
            f"{counted(lines, 'line')}, which are not read",
            cause="a node lost power, a fault of the file system, or another program wrote to it",
            remedy="no checkpoint needs the file; a resumed run writes steps that it takes again",
        )
    ]  # fmt: skip


def _died(stage: StageState) -> list[Finding]:
    """Return why nothing works on a stage: a node, its processes or a file of it are gone."""
    resumes = "the command that started it resumes it from its last checkpoint"
    if stage.job is not None and stage.job.state == "NODE_FAIL":
        kind, said = "node_lost", f"a node of job {stage.job.number} is lost (NODE_FAIL)"
        cause = "the node crashed or was taken out of the cluster"
    elif stage.state == "broken":
        return [Finding(kind="damaged", step=stage.step, said=stage.reason)]
    elif stage.state == "failed":
        kind, said = "failed", f"{stage.name} failed: {stage.reason or 'no reason'}"
        cause = "see the output of its ranks"
    elif stage.state == "stopped" and not stage.reason:
        kind, said = "ended", f"the processes of {stage.name} are gone, at step "
        said += progress_of(stage).replace("/", " of ")
        cause = "they were killed (out of memory, a reboot, kill -9), or stopped by hand"
    else:
        return []
    return [Finding(kind=kind, step=stage.step, said=said, cause=cause, remedy=resumes)]


def _hangs(stage: StageState, lines: Sequence[dict[str, Any]], silent: float) -> list[Finding]:
    """Return the finding that a running stage writes no step for too long."""
    seconds = [each for one in lines[-RECENT:] if math.isfinite(each := number(one, "seconds"))]
    limit = SILENT_SECONDS if lines else SILENT_AT_START
    limit = max(limit, SILENT_STEPS * median(seconds)) if seconds else limit
    if stage.state != "running" or silent < limit:
        return []
    return [
        Finding(
            kind="hang", step=stage.step,
            said=f"{stage.name} has written no step for {silent:,.0f} s; its processes still run",
            cause="a rank waits in a collective for one that is lost, or for a file system",
            remedy="`longhaul doctor hang --run RUN` reads what the ranks wrote; their guard ends "
            "a rank that hangs for too long",
        )
    ]  # fmt: skip
