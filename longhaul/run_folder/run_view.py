# SPDX-License-Identifier: Apache-2.0
"""A run as a watcher sees it: progress, newest step, findings, what a dead run cannot say; light.

Ages are measured by this process's own monotonic clock from the moment it saw a change, so that a
clock that jumps, here or on the machine that trains, changes none of them. Only what happened
before the first look is dated by the times of files.
"""

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from eval.run_folder import require_run
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
from longhaul.run_folder.lock import holder_of
from longhaul.run_folder.stage_named import stage_named
from longhaul.run_folder.state import RunState, StageState, run_state
from recipes.checkpoints.marker import MARKER
from recipes.spec.finding import EVENTS, Finding, read, recorded
from recipes.spec.naming import counted, stage_folder

AT_WORK = ("running", "in use", "queued")
LONGEST_AGE = 30 * 86_400.0
"""Age of a file beyond which a clock is wrong."""


@dataclass(frozen=True, kw_only=True)
class StageView:
    """One stage: its state, its newest line of metrics, and its findings."""

    state: StageState
    line: dict[str, Any] = field(default_factory=dict)
    """The newest line of metrics; empty before the first."""
    losses: tuple[float, ...] = ()
    """Of the newest steps."""
    silent_seconds: float = math.nan
    """Since its newest line appeared."""
    checkpoint_seconds: float = math.nan
    """Age of the newest checkpoint."""
    findings: tuple[Finding, ...] = ()
    past: tuple[Finding, ...] = ()
    """Findings that have ended, and events that it has survived."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run at one look."""

    run: Path
    state: RunState | None
    """None while its folder cannot be read."""
    stages: tuple[StageView, ...] = ()
    findings: tuple[Finding, ...] = ()
    """Of the run as a whole, such as a folder that is gone."""

    @property
    def is_at_work(self) -> bool:
        """Whether it trains, waits for machines, or is held by a command."""
        if self.state is None:
            return True
        stages = any(stage.state.state in AT_WORK for stage in self.stages)
        return stages or bool(self.state.holders)

    @property
    def current(self) -> StageView | None:
        """The stage at work, or the last that has begun."""
        begun = [stage for stage in self.stages if stage.state.state not in ("waiting", "queued")]
        working = [stage for stage in begun if stage.state.state in AT_WORK]
        return next(iter(working or begun[::-1]), None)

    @property
    def all_findings(self) -> list[tuple[str, Finding]]:
        """The findings that hold now, each with its stage."""
        of_stages = [(one.state.name, each) for one in self.stages for each in one.findings]
        return [*(("", each) for each in self.findings), *of_stages]


class RunWatch:
    """Looks at a run again and again."""

    def __init__(self, run: Path, stage: str = "", now: Callable[[], float] = time.monotonic):
        """Take the run, the only stage to look at (empty: all), and the clock of durations."""
        self.run, self.only, self.now = run, stage, now
        self._tails: dict[str, MetricsTail] = {}
        self._changed: dict[str, tuple[Any, float]] = {}
        self._worked: set[str] = set()
        self._lost_at: float | None = None
        self._last = RunView(run=run, state=None)

    def look(self) -> RunView:
        """Return the run now; raise ValueError on the first look if it is not a run."""
        try:
            state = run_state(self.run)
            if not self.run.is_dir():
                raise ValueError(f"{self.run} vanished")
        except (OSError, ValueError) as error:
            if self._last.state is None:
                raise
            return self._lost(error)
        if self._last.state is not None and self._last.stages and not state.stages:
            return self._lost(ValueError("it has no stages any more"))
        self._lost_at = None
        full = self._full(state)
        stages = [one for one in state.stages if self.only in ("", one.name)]
        self._last = RunView(
            run=self.run, state=state, stages=tuple(self._stage(one) for one in stages),
            findings=() if full is None else (full,),
        )  # fmt: skip
        return self._last

    def _full(self, state: RunState) -> Finding | None:
        """Return the finding that a file system has no room, while stages are left to be done."""
        try:
            free = shutil.disk_usage(self.run).free
        except OSError:
            return None
        if free >= FREE_BYTES or all(one.state == "done" for one in state.stages):
            return None
        return Finding(
            kind="disk_full", step=max((one.step for one in state.stages), default=0),
            said=f"the file system of {self.run} has {free / 2**20:,.1f} MiB left",
            cause="checkpoints and logs of this or of other runs fill it",
            remedy="make room; a run that has ended resumes by the same command from its last "
            "complete checkpoint",
        )  # fmt: skip

    def _lost(self, error: Exception) -> RunView:
        """Return the last view with the finding that the folder is gone."""
        self._lost_at = self.now() if self._lost_at is None else self._lost_at
        finding = Finding(
            kind="folder_lost",
            step=max((one.state.step for one in self._last.stages), default=0),
            said=f"{self.run} cannot be read: {' '.join(str(error).split())}",
            cause="the shared file system was unmounted or is down, or the folder was moved",
            remedy="mount it again; a run that ended meanwhile resumes by the same command",
        )
        return replace(self._last, findings=(finding,))

    def _stage(self, state: StageState) -> StageView:
        folder = stage_folder(self.run, state.name)
        tail = self._tails.setdefault(state.name, MetricsTail(folder / "metrics.jsonl"))
        tail.poll()
        lines = list(tail.lines)
        written = tail.last["step"] if tail.last else 0
        if state.step < written and not written > state.steps:  # since the state was read
            state = replace(state, step=written)
        silent = self._age((state.name, "line"), state.step, tail.path)
        saved = math.nan
        if state.checkpoint_step is not None:
            newest = folder / "checkpoints" / f"step={state.checkpoint_step}"
            saved = self._age((state.name, "saved"), newest.name, newest / MARKER)
        if state.state == "running":
            self._worked.add(state.name)
        current, past = recorded(read(folder))
        found, survived = self._of_stage(state, lines, current, past, silent)
        found += _garbled(state, tail)
        return StageView(
            state=state,
            line=tail.last,
            losses=tuple(loss for one in lines if math.isfinite(loss := number(one, "loss"))),
            silent_seconds=silent,
            checkpoint_seconds=saved,
            findings=tuple(found),
            past=tuple(survived),
        )

    def _of_stage(
        self,
        state: StageState,
        lines: Sequence[dict[str, Any]],
        current: list[Finding],
        past: list[Finding],
        silent: float,
    ) -> tuple[list[Finding], list[Finding]]:
        """Return the findings of a stage that hold, and those that it has survived.

        A stage that is done has at most that its files are of another run. An event holds until a
        step is taken after it.
        """
        if state.state == "done":
            return _foreign(state, lines), [*past, *current]
        found = list(current)
        last = lines[-1]["step"] if lines else 0
        events = [one for one in past if one.kind in EVENTS and one.step >= last]
        found += events[-1:]
        known = {one.kind for one in found}
        found += [one for one in findings(lines) if one.kind not in known]
        known |= {one.kind for one in found}
        found += _foreign(state, lines)
        observed = _observed(state, lines, silent, worked=state.name in self._worked)
        if observed is not None and not (observed.kind in EVENTS | {"ended"} and events):
            found += [observed] if observed.kind not in known else []
        return found, [one for one in past if one not in found]

    def _age(self, key: tuple[str, str], value: Any, path: Path) -> float:
        """Return the seconds since a value changed; at the first look by the time of a file."""
        name, now = "/".join(key), self.now()
        before = self._changed.get(name)
        if before is None:
            age = _file_age(path)
            self._changed[name] = value, now - (age if math.isfinite(age) else 0.0)
            return age
        if before[0] != value:
            self._changed[name] = value, now
        return now - self._changed[name][1]


def run_and_stage(run: Path, stage: str) -> tuple[Path, str]:
    """Return the run and the stage that are meant; raise ValueError for what is not a run."""
    if run.name in ("", ".."):  # `.` and `..` have no name of a stage in them
        run = run.resolve()
    if run.parent.name == "stages" and (run / "stage.json").is_file():
        if stage and stage != run.name:
            raise ValueError(f"{run} is the folder of a stage, and --stage names {stage}")
        run, stage = run.parent.parent, run.name
    names = require_stages(run)
    return run, stage and stage_named(run, stage, names)


def require_stages(run: Path) -> list[str]:
    """Return the names of a run's stages, none before the first; raise ValueError if it is none."""
    require_run(run)
    names = sorted(folder.name for folder in (run / "stages").glob("*/") if folder.is_dir())
    known = names or (run / "run.json").is_file() or (run / "launch").is_dir()
    if not known and holder_of(run) is None:
        raise ValueError(
            f"{run} is not a run folder: it has no stages; name the folder that `longhaul run` or "
            "`longhaul pretrain` writes to (--out)"
        )
    return names


def _file_age(path: Path) -> float:
    """Return the age of a file; NaN without one, and where a clock is wrong."""
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:
        return math.nan
    return age if 0 <= age < LONGEST_AGE else (0.0 if -5 < age < 0 else math.nan)


def _foreign(state: StageState, lines: Sequence[dict[str, Any]]) -> list[Finding]:
    """Return the finding that metrics are not of this stage: they have a step that it has not."""
    last = lines[-1]["step"] if lines else 0
    if not last > state.steps:
        return []
    return [
        Finding(
            kind="foreign_metrics", step=last,
            said=f"metrics.jsonl has step {last:,}, and {state.name} has {state.steps:,.0f} steps",
            cause="the file is of another run or stage",
            remedy="put the stage's own file back, or move this one away; no checkpoint needs it",
        )
    ]  # fmt: skip


def _garbled(state: StageState, tail: MetricsTail) -> list[Finding]:
    """Return the finding that lines of the metrics have bytes that a run never writes."""
    if not tail.garbled:
        return []
    return [
        Finding(
            kind="damaged_metrics", step=state.step,
            said="metrics.jsonl has NULs or bytes that are not UTF-8 in "
            f"{counted(tail.garbled, 'line')}, which are not read",
            cause="a node lost power, a fault of the file system, or another program wrote to it",
            remedy="no checkpoint needs the file; a resumed run writes steps that it takes again",
        )
    ]  # fmt: skip


def _observed(
    state: StageState, lines: Sequence[dict[str, Any]], silent: float, *, worked: bool
) -> Finding | None:
    """Return what a run cannot say itself: that it hangs, that it is gone, that a node is lost."""
    step = state.step
    resumes = "the command that started it resumes it from its last checkpoint"
    if state.job is not None and state.job.state == "NODE_FAIL":
        return Finding(
            kind="node_lost", step=step, cause="the node crashed or was taken out of the cluster",
            said=f"a node of job {state.job.number} is lost (NODE_FAIL)", remedy=resumes,
        )  # fmt: skip
    if state.state == "broken":
        return Finding(kind="damaged", step=step, said=state.reason)
    if state.state == "failed":
        return Finding(
            kind="failed", step=step, said=f"{state.name} failed: {state.reason or 'no reason'}",
            cause="see the output of its ranks", remedy=resumes,
        )  # fmt: skip
    if state.state == "stopped" and not state.reason:
        return Finding(
            kind="ended", step=step,
            said=f"the processes of {state.name} are gone, at step {step:,} of {state.steps:,.0f}"
            if math.isfinite(state.steps) else f"the processes of {state.name} are gone",
            cause="they were killed (out of memory, a reboot, kill -9), or stopped by hand"
            + (" while this command watched" if worked else ""),
            remedy=resumes,
        )  # fmt: skip
    if state.state != "running" or not math.isfinite(silent):
        return None
    seconds = [each for one in lines[-RECENT:] if math.isfinite(each := number(one, "seconds"))]
    limit = SILENT_AT_START if not lines else SILENT_SECONDS
    if seconds:
        limit = max(limit, SILENT_STEPS * median(seconds))
    if silent < limit:
        return None
    return Finding(
        kind="hang", step=step,
        said=f"{state.name} has written no step for {silent:,.0f} s; its processes still run",
        cause="a rank waits in a collective for one that is lost, or for a file system",
        remedy="`longhaul doctor hang --run RUN` reads what the ranks wrote; their guard ends a "
        "rank that hangs for too long",
    )  # fmt: skip
