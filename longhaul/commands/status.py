# SPDX-License-Identifier: Apache-2.0
"""`longhaul status`: show or follow the progress of a run by stage, and what is wrong with it."""

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.table import Table

from eval.run_folder import Step, plain
from longhaul.findings.follow import RunWatch, finding_lines
from longhaul.findings.follow import follow as watch
from longhaul.options import Json, RunOption, RunOrStage, print_json, run_of
from longhaul.run_folder.lock import holder_of
from longhaul.run_folder.stage_named import run_and_stage
from longhaul.run_folder.state import NONE_STARTED, RunState, StageState
from longhaul.terminal.console import print_left_out, show
from longhaul.terminal.messages import next_command, note
from longhaul.terminal.pace import duration
from recipes.spec.naming import amount

COLUMNS = ("stage", "state", "step", "tokens", "left", "checkpoint", "evaluated", "job")
EXPENDABLE = ("evaluated", "tokens", "checkpoint", "left", "job")
"""Columns that a narrow terminal shows as lines below the table, from the first on."""


def status(
    given: RunOrStage = None,
    run: RunOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Print a line where something changes, to the end.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show how far a run is and what is wrong with it, once or with --follow until it ends."""
    run, _ = run_and_stage(run_of(given, run))
    if follow:
        _follow(run, as_json=as_json)
    found = RunWatch(run).look()
    if as_json:
        print_json(_content(found))
        return
    if found.trouble:
        typer.echo(f"broken: {found.trouble}")
    evaluating = holder_of(run / "eval")
    for holder in found.holders:
        typer.echo(holder.words)
    if evaluating is not None and evaluating.process not in {one.process for one in found.holders}:
        typer.echo(f"eval: {evaluating.words}")
    if not found.stages:
        typer.echo(f"{run}: {NONE_STARTED}")
        return
    head = f"{found.card} on ladder {found.ladder}" if found.card else "stages"
    lines = [_line(stage) for stage in found.stages]

    def table(without: Sequence[str]) -> Table:
        made = Table(title=f"{head} in {run}")
        titles = [title for title in COLUMNS if title not in without]
        for title in titles:
            right = title in ("step", "tokens", "left", "checkpoint")
            made.add_column(title, no_wrap=True, justify="right" if right else "left")
        for line in lines:
            made.add_row(*(line[title] for title in titles))
        return made

    empty = [title for title in ("job",) if not any(line[title] for line in lines)]
    left_out = show(lambda without: table((*without, *empty)), EXPENDABLE)
    print_left_out(lines, "stage", left_out)
    for stage in found.stages:
        if stage.reason and not any(stage.reason in one.said for one in stage.findings):
            typer.echo(f"{stage.name}: {stage.reason}")
        if stage.while_training is not None:
            for words in _while_training(stage.name, stage.while_training):
                typer.echo(words)
    for name, finding in found.all_findings:
        for line in finding_lines(name, finding):
            typer.echo(line)
    for logs in dict.fromkeys(stage.logs for stage in found.stages if stage.logs is not None):
        typer.echo(f"logs: {logs}")
    if any(stage.state in ("running", "in use") for stage in found.stages):
        note(
            f"`{shlex.join(['touch', str(run / 'save')])}` saves at the end of a step, "
            f"`{shlex.join(['touch', str(run / 'stop')])}` saves and stops"
        )
    others = [job for job in found.jobs if job.name not in {stage.name for stage in found.stages}]
    for job in others:
        if job.state not in ("", "COMPLETED"):
            typer.echo(f"job {job.number} {job.name}: {job.state.lower()}")
    if any(stage.is_resumable for stage in found.stages):
        saved = any(stage.checkpoint_step is not None for stage in found.stages)
        does = (
            "resumes it from the last checkpoint"
            if saved
            else "starts it again; no checkpoint is complete"
        )
        note(f"the command that started the run {does}")
    if all(stage.state == "done" for stage in found.stages):
        waiting = [stage.name for stage in found.stages if not stage.evaluated]
        typer.echo("all stages are trained" if waiting else "all stages are done")
        if waiting and evaluating is None:
            command = ["longhaul", "evaluate", "--run", str(run)]
            next_command(command, f"evaluate {', '.join(waiting)}")
    elif math.isfinite(found.seconds_left):
        typer.echo(
            f"about {duration(found.seconds_left)} of training left, at the last steps' pace"
        )


def _follow(run: Path, *, as_json: bool) -> NoReturn:
    """Print what changes until the run ends; exit code 0: all its stages are done."""

    def show(found: RunState, lines: list[str]) -> None:
        if as_json:
            lines = [json.dumps(plain(_content(found)), allow_nan=False, default=str)]
        typer.echo("\n".join(lines))

    try:
        done = watch(run, show)
    except KeyboardInterrupt:
        note("stopped following; the run is not affected")
        raise typer.Exit(0) from None
    if not as_json:
        typer.echo("the run has ended" if done else "nothing works on this run any more")
    raise typer.Exit(0 if done else 1)


def _line(stage: StageState) -> dict[str, str]:
    """Return the table's row of a stage, by column."""
    steps = f"{stage.steps:,.0f}" if math.isfinite(stage.steps) else "?"
    left = stage.seconds_left
    job = stage.job
    return {
        "stage": stage.name,
        "state": f"{stage.state} on {stage.host}" if stage.host else stage.state,
        "step": f"{stage.step:,}/{steps}",
        "tokens": f"{_tokens(stage.tokens)}/{_tokens(stage.tokens_planned)}",
        "left": duration(left) if math.isfinite(left) and left > 0 else "",
        "checkpoint": "" if stage.checkpoint_step is None else f"step {stage.checkpoint_step:,}",
        "evaluated": _evaluated(stage),
        "job": "" if job is None else f"{job.number} {job.words}",
    }


def _evaluated(stage: StageState) -> str:
    """Return whether a stage was evaluated; the step if its newest checkpoint is a later one."""
    saved = stage.checkpoint_step
    if stage.evaluated_step is not None and saved not in (None, stage.evaluated_step):
        return f"at step {stage.evaluated_step:,}"
    return "yes" if stage.evaluated else "no"


def _while_training(name: str, step: Step) -> Iterator[str]:
    """Yield lines with what was measured at the last step at which a stage was evaluated."""
    yield (
        f"{name} at step {step.step:,}: held-out loss {step.heldout_loss:.3f}, passkey "
        f"{step.passkey_nats:.2f} nats per token"
    )
    if step.heldout_by_quarter:
        losses = " ".join(f"{loss:.3f}" for loss in step.heldout_by_quarter)
        yield f"  by quarter of the window: {losses}"
    if step.heldout_by_length:
        losses = ", ".join(
            f"{loss:.3f} from {int(length):,}" for length, loss in step.heldout_by_length.items()
        )
        yield f"  by tokens of a whole document: {losses}"


def _tokens(count: float) -> str:
    return amount(round(count)) if math.isfinite(count) else "?"


def _content(found: RunState) -> dict[str, Any]:
    """Return all of it for programs: times in seconds, sizes in steps and tokens."""
    return {
        **asdict(found),
        "run": str(found.run),
        "stages": [
            {**asdict(stage), "logs": None if stage.logs is None else str(stage.logs)}
            for stage in found.stages
        ],
    }
