# SPDX-License-Identifier: Apache-2.0
"""`longhaul doctor hang`: what the ranks wrote when they hung, and which ranks did not.

Ranks write two things: their last collectives, where a collective of NCCL reached its timeout
(`slurm.flight_recorder`), and their stacks, where the guard ended a step that took too long.
"""

import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from eval.run_folder import StageResults, load
from longhaul.doctor import stacks
from longhaul.doctor.collectives import Last, behind, last_collectives
from longhaul.doctor.log import content as log_content
from longhaul.doctor.log import describe
from longhaul.doctor.logs.reader import Log, logs_of, read
from longhaul.doctor.stacks import Stack
from longhaul.doctor.stage_files import stage_facts
from longhaul.options import Json, RunArgument, RunOption, print_json, run_of
from longhaul.run_folder.stage_named import stage_named
from longhaul.terminal.messages import next_command
from recipes.spec.naming import counted, stage_folder
from slurm.flight_recorder import FOLDER, PREFIX, Dump, dumps

NAMED = 16
"""Ranks that are named one by one; more are counted."""


def hang(
    given: RunArgument = None,
    run: RunOption = None,
    stage: Annotated[
        str, typer.Option(help="A stage of the run.", show_default="the one with the newest dump")
    ] = "",
    as_json: Json = False,
) -> None:
    """Find where the ranks hung: their stacks and last collectives, and which wrote nothing."""
    run = run_of(given, run)
    if run.is_file():
        raise ValueError(f"{run} is a file; `longhaul doctor log` reads logs")
    record, stages = load(run)
    stage = stage and stage_named(run, stage, record.stages)
    asked = [one for one in stages if stage in ("", one.name)]
    found = [(dump, one) for one in asked for dump in dumps(stage_folder(run, one.name))]
    hung = [(each, one) for one in asked if (each := stacks.stacks(stage_folder(run, one.name)))]
    logs = _what_logs_tell(run, asked)
    if not found and not hung:
        if as_json:
            print_json({"log": log_content(logs)} if logs.faults else None)
            return
        _show_log(logs, run)
        where = stage_folder(run, stage) if stage else f"a stage of {run}"
        typer.echo(
            f"{where} has no dump in its folder {FOLDER}: no collective of NCCL reached its "
            "timeout, or its ranks were killed before they wrote. Ranks on CPUs write none. Its "
            f"folder {stacks.FOLDER} has no stacks either: the guard has ended no rank."
        )
        return
    of_stacks, of_stage = hung[-1] if hung else ([], None)
    if not found:
        assert of_stage is not None
        if as_json:
            stated = {"stage": of_stage.name, "stacks": _of_stacks(of_stacks)}
            print_json({**stated, "log": log_content(logs)})
            return
        _show_stacks(of_stacks, of_stage)
        _show_log(logs, run)
        return
    dump, here = max(found, key=lambda one: one[0].last)
    world, collectives, unread = _world_size(run, here), *_collectives(dump)
    if as_json:
        stated = {"behind": list(behind(collectives)), "stacks": _of_stacks(of_stacks)}
        print_json({**_content(dump, here, world), **stated, "log": log_content(logs)})
        return
    _show(dump, here, world)
    for line in (*behind(collectives), *unread):
        typer.echo(line)
    if of_stage is not None:
        _show_stacks(of_stacks, of_stage)
    _show_log(logs, run)
    next_command(
        dump.command(complete=not (dump.silent(world) if world else ())),
        "compare all collectives of the ranks (it unpickles the files, so only of your own jobs)",
    )


def _what_logs_tell(run: Path, stages: Sequence[StageResults]) -> Log:
    """Return what the newest output of the ranks tells; nothing without output."""
    for stage in reversed(stages):
        log = read(logs_of(run, stage.name))
        if log.faults:
            return log
    return Log()


def _show_log(log: Log, run: Path) -> None:
    for line in describe(log, run) if log.faults else ():
        typer.echo(line)


def _collectives(dump: Dump) -> tuple[dict[int, dict[str, Last]], list[str]]:
    """Return the last collectives of each rank, and why files cannot be read."""
    read, unread = dict[int, dict[str, Last]](), []
    for rank in dump.ranks:
        try:
            read[rank] = last_collectives(dump.folder / f"{PREFIX}{rank}")
        except ValueError as error:
            unread.append(str(error))
    return read, unread


def _show_stacks(found: Sequence[Stack], stage: StageResults) -> None:
    """Print where the ranks were that the guard has ended."""
    folder = found[0].file.parent
    typer.echo(
        f"{stage.name}: the guard ended {counted(len(found), 'rank')} that hung; the stacks of all "
        f"threads are in {folder}"
    )
    for line in stacks.describe(found):
        typer.echo(line)


def _of_stacks(found: Sequence[Stack]) -> list[dict[str, object]]:
    return [
        {"ranks": ranks, "frames": list(frames)} for frames, ranks in stacks.groups(list(found))
    ]


def _show(dump: Dump, stage: StageResults, world: int | None) -> None:
    """Print when the ranks wrote, which did not, and how to compare them."""
    span = dump.last - dump.first
    ranks = [
        rank for rank in dump.ranks if not world or rank < world
    ]  # not of an older, larger one
    typer.echo(
        f"{stage.name}: at {_local(dump.first)} a collective reached its timeout or failed. "
        f"{counted(len(ranks), 'rank')}{f' of {world:,}' if world else ''} wrote their last "
        f"collectives{f' within {span:,.0f} s' if span >= 1 else ''} to {dump.folder}"
    )
    silent = dump.silent(world) if world else ()
    if silent:
        named = ", ".join(map(str, silent[:NAMED]))
        more = f" and {len(silent) - NAMED:,} more" if len(silent) > NAMED else ""
        typer.echo(
            f"{counted(len(silent), 'rank')} wrote none ({named}{more}): they had ended, or their "
            "node was not reached; look at their output first"
        )
    elif world:
        typer.echo(
            "Every rank wrote, also one that hangs outside of NCCL: the one whose last collective "
            "is behind that of the others."
        )


def _content(dump: Dump, stage: StageResults, world: int | None) -> dict[str, object]:
    silent = dump.silent(world) if world else None
    return {
        "stage": stage.name,
        "folder": str(dump.folder),
        "prefix": PREFIX,
        "ranks": list(dump.ranks),
        "silent_ranks": None if silent is None else list(silent),
        "world_size": world,
        "first_unix_seconds": dump.first,
        "last_unix_seconds": dump.last,
        "command": shlex.join(dump.command(complete=not silent)),
    }


def _local(seconds: float) -> str:
    """Return a time of day where the command runs, with its offset."""
    return datetime.fromtimestamp(seconds, timezone.utc).astimezone().strftime("%F %T %z")


def _world_size(run: Path, stage: StageResults) -> int | None:
    """Return the ranks of a stage by its recipe; None if that does not state them."""
    facts = stage_facts(run, stage)
    nodes, each = facts.of_recipe("trainer.num_nodes"), facts.of_recipe("trainer.devices")
    return nodes * each if isinstance(nodes, int) and isinstance(each, int) else None
