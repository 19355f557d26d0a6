# SPDX-License-Identifier: Apache-2.0
"""`longhaul doctor hang`: which ranks were in a collective that hung, and which were not."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from eval.run_folder import StageResults, load
from longhaul.doctor.stage_files import stage_facts
from longhaul.options import Json, Run, print_json
from longhaul.terminal.messages import next_command
from recipes.spec.naming import counted, stage_folder
from recipes.spec.suggest import did_you_mean
from slurm.flight_recorder import FOLDER, Dump, dumps

NAMED = 16
"""Ranks that are named one by one; more are counted."""


def hang(
    run: Run,
    stage: Annotated[
        str, typer.Option(help="A stage of the run.", show_default="the last one with a dump")
    ] = "",
    as_json: Json = False,
) -> None:
    """Find the files that ranks wrote when a collective hung, and the ranks that wrote none."""
    record, stages = load(run)
    if stage and stage not in record.stages:
        raise ValueError(f"{run} has no stage {stage!r}; {did_you_mean(stage, record.stages)}")
    asked = [one for one in stages if stage in ("", one.name)]
    found = {one.name: dumps(stage_folder(run, one.name)) for one in asked}
    hung = [one for one in asked if found[one.name]]
    if as_json:
        dump = found[hung[-1].name][-1] if hung else None
        print_json(None if dump is None else _content(run, hung[-1], dump))
        return
    if not hung:
        where = stage_folder(run, stage or "STAGE") / FOLDER
        typer.echo(
            f"no rank has written a dump to {where}: no collective of NCCL has reached its "
            "timeout there. Ranks on CPUs write none."
        )
        return
    here = hung[-1]
    dump = found[here.name][-1]
    world = _world_size(run, here)
    of_all = f" of {world:,}" if world else ""
    span = f" within {dump.last - dump.first:,.0f} s" if dump.last - dump.first >= 1 else ""
    typer.echo(
        f"{here.name}: {counted(len(dump.ranks), 'rank')}{of_all} waited in a collective until its "
        f"timeout and wrote their last collectives{span} to {dump.folder}/{dump.prefix}*"
    )
    silent = dump.silent(world)
    if silent:
        named = ", ".join(map(str, silent[:NAMED]))
        more = f" and {len(silent) - NAMED:,} more" if len(silent) > NAMED else ""
        typer.echo(
            f"{counted(len(silent), 'rank')} wrote none ({named}{more}): they had ended, or hung "
            "outside of NCCL; look at their output first"
        )
    elif world:
        typer.echo("every rank wrote: they wait in different collectives, or a link is broken")
    next_command(
        ["torchfrtrace", "--prefix", dump.prefix, dump.folder],
        "compare the collectives of the ranks (it unpickles the files, so only of your own jobs)",
    )


def _content(run: Path, stage: StageResults, dump: Dump) -> dict[str, object]:
    world = _world_size(run, stage)
    return {
        "stage": stage.name,
        "folder": str(dump.folder),
        "prefix": dump.prefix,
        "ranks": list(dump.ranks),
        "silent_ranks": list(dump.silent(world)),
        "world_size": world,
        "first_unix_seconds": dump.first,
        "last_unix_seconds": dump.last,
        "command": shlex.join(["torchfrtrace", "--prefix", dump.prefix, str(dump.folder)]),
    }


def _world_size(run: Path, stage: StageResults) -> int:
    """Return the ranks of a stage by its recipe; 0 if that does not state them."""
    facts = stage_facts(run, stage)
    nodes, each = facts.of_recipe("trainer.num_nodes"), facts.of_recipe("trainer.devices")
    return nodes * each if isinstance(nodes, int) and isinstance(each, int) else 0
