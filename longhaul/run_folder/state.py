# SPDX-License-Identifier: Apache-2.0
"""Progress of the stages of a run, from the files of its folder and from Slurm; light."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from custom_modules.checkpoints.index import CheckpointError
from eval.run_folder import (
    BrokenResultError,
    MissingResultError,
    StageRecord,
    Step,
    evaluation_path,
    newest_evaluated_step,
    read_evaluation,
    read_run,
    read_stage,
    require_run,
    stage_names,
)
from longhaul.jobs.slurm_queue import SlurmJob, submitted
from longhaul.run_folder.lock import OF_RANKS, Holder, holder_of, is_locked
from longhaul.terminal.pace import Pace, Part, ladder_left, last_lines
from recipes.checkpoints.marker import checkpoint_facts, newest_checkpoint
from recipes.spec.finding import Finding
from recipes.spec.naming import stage_folder
from slurm.outcome import outcome

State = Literal[
    "done", "running", "in use", "queued", "stopped", "failed", "waiting", "unknown", "broken"
]
"""`in use`: by a process of another machine; `unknown`: Slurm could not be asked for the job."""
FROM_CHECKPOINT = ("stopped", "failed", "queued")
"""States of a stage whose steps after its newest checkpoint are taken again."""
AT_WORK = ("running", "in use", "queued")
NONE_STARTED = "no stage has been started here"


@dataclass(frozen=True, kw_only=True)
class StageState:
    """Progress of a stage; figures that no file states are NaN."""

    name: str
    state: State
    reason: str = ""
    """Why it stopped, failed, is unknown or cannot be read."""
    host: str = ""
    """The machine that it is in use on, if that is another one."""
    step: int = 0
    """The last complete step."""
    steps: float = math.nan
    tokens: float = math.nan
    tokens_planned: float = math.nan
    seconds_left: float = math.nan
    checkpoint_step: int | None = None
    """Step of the newest complete checkpoint."""
    evaluated: bool = False
    evaluated_step: int | None = None
    """Step of the checkpoint that was evaluated, if the evaluation states it."""
    while_training: Step | None = None
    """The last step at which the model was evaluated while it trained."""
    job: SlurmJob | None = None
    logs: Path | None = None
    """Folder that the ranks' output is in."""
    newest: Mapping[str, Any] = field(default_factory=dict)
    """Its newest line of metrics, and its findings: of a look (`findings/follow.py`) alone."""
    findings: Sequence[Finding] = ()
    past_findings: Sequence[Finding] = ()
    """Those that have ended, and events that it has survived."""

    @property
    def is_resumable(self) -> bool:
        """Whether it ended early; False for a job whose state is unknown."""
        job_known = self.job is None or bool(self.job.state)
        return self.state in ("stopped", "failed") and job_known


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Progress of a run."""

    run: Path
    card: str
    ladder: str
    stages: Sequence[StageState]
    seconds_left: float
    """Of all stages that are not done; NaN if no stage has a pace."""
    jobs: Sequence[SlurmJob]
    holders: Sequence[Holder] = ()
    """Processes that write into the run folder or the folder of a stage."""
    trouble: str = ""
    """Why the run's own records cannot be read."""
    findings: Sequence[Finding] = ()
    """Of the run as a whole, such as a folder that is gone."""

    @property
    def is_at_work(self) -> bool:
        """Whether it trains, waits for machines, or is held by a command."""
        return bool(self.holders) or any(stage.state in AT_WORK for stage in self.stages)

    @property
    def all_findings(self) -> list[tuple[str, Finding]]:
        """The findings that hold now, each with its stage."""
        of_stages = [(stage.name, one) for stage in self.stages for one in stage.findings]
        return [*(("", one) for one in self.findings), *of_stages]


def run_state(run: Path) -> RunState:
    """Read the progress of a run.

    Raises ValueError if there is no such folder. Broken files in it are reported, not raised.
    """
    require_run(run)
    troubles, jobs, card, ladder = [], [], "", ""
    try:
        record = read_run(run)
        card, ladder = record.card, record.ladder
    except MissingResultError:  # stages that `longhaul pretrain` trains alone
        pass
    except ValueError as error:
        troubles.append(str(error))
    try:
        jobs = submitted(run)
    except ValueError as error:
        troubles.append(str(error))
    found, parts = [], []
    for name in _names(run):
        state, part = _stage(run, name, {job.name: job for job in jobs})
        found.append(state)
        parts.append(part)
    of_run = holder_of(run)
    of_stages = {stage.name: holder_of(stage_folder(run, stage.name)) for stage in found}
    holders = [holder for holder in (of_run, *of_stages.values()) if holder is not None]
    stages = _held(found, of_run, of_stages)
    for at, (stage, part) in enumerate(zip(stages, parts, strict=True)):
        if part is not None and stage.state in FROM_CHECKPOINT:
            pace = Pace(stage.checkpoint_step or 0, part.pace.seconds)
            stages[at] = replace(stage, seconds_left=pace.left(part.steps))
            parts[at] = replace(part, pace=pace)
    return RunState(
        run=run, card=card, ladder=ladder, stages=stages, jobs=jobs,
        holders=list(dict.fromkeys(holders)), trouble="; ".join(troubles),
        seconds_left=math.nan if None in parts else ladder_left([one for one in parts if one]),
    )  # fmt: skip


def _held(
    stages: Sequence[StageState], of_run: Holder | None, of_stages: dict[str, Holder | None]
) -> list[StageState]:
    """Return the stages with their states adapted to the processes that hold them or the run.

    A process takes its stages one after the other: the first that is not done is running, even if
    its ranks are still starting, and the others wait.
    """
    busy: set[tuple[str, int]] = set()
    found = []
    for stage in stages:
        holder = of_stages[stage.name] or of_run
        if holder is None or stage.state in ("done", "queued", "broken"):
            found.append(stage)
            continue
        whose = (holder.host, holder.process)
        if stage.state == "running":
            found.append(stage)
        elif whose in busy:
            found.append(replace(stage, state="waiting", reason=""))
        elif holder.is_here:
            found.append(replace(stage, state="running", reason=""))
        else:
            found.append(replace(stage, state="in use", host=holder.host, reason=""))
        busy.add(whose)
    return found


def _names(run: Path) -> list[str]:
    """Return the names of the stages; of their folders if no record can be read."""
    try:
        return stage_names(run)
    except (MissingResultError, BrokenResultError):
        folders = (run / "stages").glob("*/")
        return sorted(folder.name for folder in folders if folder.is_dir())


def _stage(run: Path, name: str, jobs: dict[str, SlurmJob]) -> tuple[StageState, Part | None]:
    """Return the progress of a stage; if files cannot be read it is broken, with the reason."""
    folder, job = stage_folder(run, name), jobs.get(name)
    try:
        return _readable_stage(run, name, job)
    except (BrokenResultError, CheckpointError) as error:
        reason = str(error)
    except (OSError, ValueError) as error:
        reason = f"{folder} cannot be read: {error}"
    return StageState(name=name, state="broken", reason=reason, job=job), None


def _readable_stage(run: Path, name: str, job: SlurmJob | None) -> tuple[StageState, Part | None]:
    folder = stage_folder(run, name)
    record = read_stage(run, name)
    lines = last_lines(folder / "metrics.jsonl")
    saved, steps = _checkpoint(folder / "checkpoints")
    per_step = math.nan if record is None else record.tokens_per_batch
    if math.isnan(steps):
        steps = _planned(record)
    pace = Pace.of(lines)
    foreign = pace.step > steps  # the metrics are of another run, which is a finding
    step = saved or 0 if foreign else max(pace.step, saved or 0)
    pace = Pace(step, pace.seconds)
    state, reason = _state(folder, run, job, done=saved is not None and saved >= steps, step=step)
    part = None if math.isnan(steps) else Part(int(steps), per_step, pace)
    left = math.nan if part is None else pace.left(part.steps)
    return (
        StageState(
            name=name, state=state, reason=reason, step=step, steps=steps, tokens=step * per_step,
            tokens_planned=steps * per_step, seconds_left=left, checkpoint_step=saved, job=job,
            evaluated=evaluation_path(run, name).is_file(), logs=_logs(run, folder),
            evaluated_step=_evaluated_step(run, name),
            while_training=newest_evaluated_step(folder / "metrics.jsonl"),
        ),
        part,
    )  # fmt: skip


def _checkpoint(folder: Path) -> tuple[int | None, float]:
    """Return the step of the newest checkpoint and those of its stage; None and NaN for none."""
    newest = newest_checkpoint(folder)
    facts = None if newest is None else checkpoint_facts(newest)
    return (None, math.nan) if facts is None else (facts["step"], facts["max_steps"])


def _planned(record: StageRecord | None) -> float:
    """Return the steps of a stage according to its record; NaN if that lacks them."""
    if record is None or not (math.isfinite(record.tokens) and record.tokens_per_batch > 0):
        return math.nan
    return round(record.tokens / record.tokens_per_batch)


def _evaluated_step(run: Path, name: str) -> int | None:
    try:
        found = read_evaluation(run, name)
    except BrokenResultError:  # `report` says so
        return None
    return None if found is None else found.step


def _state(
    folder: Path, run: Path, job: SlurmJob | None, *, done: bool, step: int
) -> tuple[State, str]:
    """Return the state of a stage, and why it stopped, failed or is unknown."""
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
    if job is not None and job.not_asked:
        return "unknown", f"Slurm was not asked for its job {job.number}: {job.not_asked}"
    if job is not None and not job.state:
        said = said or f"Slurm does not know its job {job.number}"
    elif job is not None and job.state != "COMPLETED":
        return "failed", f"its job ended as {job.state}"
    if step or word is not None:
        return "stopped", said
    return "waiting", said


def _logs(run: Path, folder: Path) -> Path | None:
    """Return the folder of the ranks' output: of `longhaul pretrain`, or of `longhaul run`."""
    for path in (folder / "launch", run / "launch"):
        if path.is_dir():
            return path
    return None
