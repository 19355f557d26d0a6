# SPDX-License-Identifier: Apache-2.0
"""How far the stages of a run are, from the files of its folder and from Slurm; light."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from custom_modules.checkpoint_index import CheckpointError
from eval.results import (
    BrokenResultError,
    MissingResultError,
    StageRecord,
    evaluation_path,
    read_run,
    read_stage,
    stage_folder,
    stage_names,
)
from longhaul.pace import Pace, Part, ladder_left, last_lines
from longhaul.run_lock import OF_RANKS
from longhaul.slurm_jobs import SlurmJob, submitted
from recipes.finished import checkpoint_facts, newest_checkpoint
from slurm.outcome import outcome

State = Literal["done", "running", "queued", "stopped", "failed", "waiting", "broken"]
LOCKS = Path("/proc/locks")


@dataclass(frozen=True, kw_only=True)
class StageState:
    """How far a stage is; figures that no file says are NaN."""

    name: str
    state: State
    reason: str = ""
    """Why it stopped, failed or cannot be read."""
    step: int = 0
    """The last whole step."""
    steps: float = math.nan
    tokens: float = math.nan
    tokens_planned: float = math.nan
    seconds_left: float = math.nan
    checkpoint_step: int | None = None
    """Step of the newest whole checkpoint."""
    evaluated: bool = False
    job: SlurmJob | None = None
    logs: Path | None = None
    """Folder that the ranks' output is in."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """How far a run is."""

    run: Path
    card: str
    ladder: str
    stages: Sequence[StageState]
    seconds_left: float
    """Of all stages that are not done; NaN where no stage says how fast it is."""
    jobs: Sequence[SlurmJob]
    trouble: str = ""
    """What of the run's own record cannot be read."""


def run_state(run: Path) -> RunState:
    """Read how far a run is.

    Raises ValueError where there is no such folder. What is broken in it is said, not raised.
    """
    if not run.is_dir():
        raise ValueError(f"there is no run folder at {run}; `longhaul run` makes one, at --out")
    trouble, jobs, card, ladder = "", [], "", ""
    try:
        jobs = submitted(run)
        record = read_run(run)
        card, ladder = record.card, record.ladder
    except MissingResultError:  # stages that `longhaul pretrain` trains alone
        pass
    except ValueError as error:
        trouble = str(error)
    found, parts = [], []
    for name in _names(run):
        state, part = _stage(run, name, {job.name: job for job in jobs})
        found.append(state)
        parts.append(part)
    return RunState(
        run=run, card=card, ladder=ladder, stages=found, jobs=jobs, trouble=trouble,
        seconds_left=math.nan if None in parts else ladder_left([one for one in parts if one]),
    )  # fmt: skip


def _names(run: Path) -> list[str]:
    """Return the stages, by their folders where no record can be read."""
    try:
        return stage_names(run)
    except (MissingResultError, BrokenResultError):
        folders = (run / "stages").glob("*/")
        return sorted(folder.name for folder in folders if folder.is_dir())


def _stage(run: Path, name: str, jobs: dict[str, SlurmJob]) -> tuple[StageState, Part | None]:
    folder, job = stage_folder(run, name), jobs.get(name)
    try:
        record = read_stage(run, name)
        newest = newest_checkpoint(folder / "checkpoints")
        facts = None if newest is None else checkpoint_facts(newest)
    except (BrokenResultError, CheckpointError) as error:
        return StageState(name=name, state="broken", reason=str(error), job=job), None
    lines = last_lines(folder / "metrics.jsonl")
    saved = None if facts is None else int(facts["step"])
    per_step = math.nan if record is None else record.tokens_per_batch
    steps = _steps(record, facts)
    pace = Pace.of(lines)
    step = max(pace.step, saved or 0)
    pace = Pace(step, pace.seconds)
    state, reason = _state(folder, run, job, done=saved is not None and saved >= steps, step=step)
    part = None if math.isnan(steps) else Part(int(steps), per_step, pace)
    left = math.nan if part is None else pace.left(part.steps)
    return (
        StageState(
            name=name, state=state, reason=reason, step=step, steps=steps, tokens=step * per_step,
            tokens_planned=steps * per_step, seconds_left=left, checkpoint_step=saved, job=job,
            evaluated=evaluation_path(run, name).is_file(), logs=_logs(run, folder),
        ),
        part,
    )  # fmt: skip


def _steps(record: StageRecord | None, facts: "dict[str, object] | None") -> float:
    """Return the steps of a stage, by its checkpoint or by its record; NaN for neither."""
    if facts is not None:
        return float(str(facts["max_steps"]))
    if record is None or not record.tokens_per_batch > 0:
        return math.nan
    return round(record.tokens / record.tokens_per_batch)


def _state(
    folder: Path, run: Path, job: SlurmJob | None, *, done: bool, step: int
) -> tuple[State, str]:
    """Return the state of a stage, and why it stopped or failed."""
    if is_locked(folder / OF_RANKS):
        return "running", ""
    if job is not None and job.is_live:
        return ("running", "") if job.state == "RUNNING" else ("queued", "")
    if done:
        return "done", ""
    words = [
        outcome(path)
        for path in (
            folder / "outcome",
            folder / "launch" / "outcomes" / folder.name,
            run / "launch" / "outcomes" / folder.name,
        )
    ]
    word, said = next((one for one in words if one[0] is not None), (None, ""))
    if word in ("failed", "refused"):
        return "failed", said
    if job is not None and job.state and job.state != "COMPLETED":
        return "failed", f"its job ended as {job.state}"
    if step or word is not None:
        return "stopped", said
    return "waiting", ""


def is_locked(path: Path) -> bool:
    """Return whether a process of this machine holds a file locked.

    The kernel's list is read, since trying the lock would get in the way of one that begins.
    """
    try:
        there, lines = path.stat(), LOCKS.read_text().splitlines()
    except OSError:
        return False
    place = f"{os.major(there.st_dev):02x}:{os.minor(there.st_dev):02x}:{there.st_ino}"
    return any(place in line.split() for line in lines if " FLOCK " in line)


def _logs(run: Path, folder: Path) -> Path | None:
    """Return the folder of the ranks' output: of `longhaul pretrain`, or of `longhaul run`."""
    for path in (folder / "launch", run / "launch"):
        if path.is_dir():
            return path
    return None
