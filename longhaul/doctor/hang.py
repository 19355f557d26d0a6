# SPDX-License-Identifier: Apache-2.0
"""`longhaul doctor hang`: what the ranks wrote when a collective hung, and which ranks did not."""

import shlex
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from eval.run_folder import StageResults, load
from longhaul.doctor.stage_files import stage_facts
from longhaul.options import Json, Run, print_json
from longhaul.run_folder.stage_named import stage_named
from longhaul.terminal.messages import next_command
from recipes.spec.naming import counted, stage_folder
from slurm.flight_recorder import FOLDER, PREFIX, Dump, dumps

NAMED = 16
"""Ranks that are named one by one; more are counted."""


def hang(
    run: Run,
    stage: Annotated[
        str, typer.Option(help="A stage of the run.", show_default="the one with the newest dump")
    ] = "",
    as_json: Json = False,
) -> None:
    """Find what the ranks wrote when a collective hung, and the ranks that wrote nothing."""
    record, stages = load(run)
    stage = stage and stage_named(run, stage, record.stages)
    asked = [one for one in stages if stage in ("", one.name)]
    found = [(dump, one) for one in asked for dump in dumps(stage_folder(run, one.name))]
    if not found:
        if as_json:
            print_json(None)
            return
        where = stage_folder(run, stage) if stage else f"a stage of {run}"
        typer.echo(
            f"{where} has no dump in its folder {FOLDER}: no collective of NCCL reached its "
            "timeout, or its ranks were killed before they wrote. Ranks on CPUs write none."
        )
        return
    dump, here = max(found, key=lambda one: one[0].last)
    world = _world_size(run, here)
    if as_json:
        print_json(_content(dump, here, world))
    else:
        _show(dump, here, world)


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
    next_command(
        dump.command(complete=not silent),
        "compare the collectives of the ranks (it unpickles the files, so only of your own jobs)",
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
