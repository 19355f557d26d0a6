# SPDX-License-Identifier: Apache-2.0
"""`longhaul doctor spike`: whether a jump of the loss at the start of a stage is a fault."""

from pathlib import Path
from typing import Annotated

import typer

from eval.run_folder import MissingResultError, StageResults, load
from longhaul.doctor.spike_checks import checks
from longhaul.doctor.stage_files import StageFacts, stage_facts
from longhaul.options import Json, RunArgument, RunOption, print_json, run_of
from longhaul.run_folder.stage_named import stage_named


def spike(
    given: RunArgument = None,
    run: RunOption = None,
    stage: Annotated[
        str, typer.Option(help="A stage of the run.", show_default="the last one with steps")
    ] = "",
    as_json: Json = False,
) -> None:
    """Check the loss around the start of a stage: what is normal, and what is a fault."""
    run = run_of(given, run)
    here, before = chosen(run, stage)
    steps = here.results.steps
    if as_json:
        made = list(checks(here, before))
        fault = any(check.level == "failure" for check in made)
        print_json(
            {
                "stage": here.name,
                "before": None if before is None else before.name,
                "steps": len(steps),
                "checks": made,
                "fault": fault,
            }
        )
        raise typer.Exit(1 if fault else 0)
    length = "" if here.results.record is None else f", {here.results.record.seq_length:,} tokens"
    after = f", after {before.name}" if before else ""
    typer.echo(f"{here.name}{length}: {len(steps)} steps{after}")
    worst = 0
    for check in checks(here, before):
        typer.echo(f"{check.level:<8} {check.words}")
        if check.do:
            typer.echo(f"{'':<8}   {check.do}")
        worst = max(worst, ("ok", "warning", "failure").index(check.level))
    said = (
        "nothing is wrong according to these checks",
        "no fault; look at the warnings",
        "there is a fault; start with the first failure",
    )
    typer.echo(said[worst])
    if worst == 2:
        raise typer.Exit(1)


def chosen(run: Path, name: str) -> tuple[StageFacts, StageFacts | None]:
    """Return the stage asked for, or the last that has steps, and the one before it."""
    record, stages = load(run)
    name = name and stage_named(run, name, record.stages)
    trained = [one for one in stages if one.steps]
    if not trained:
        raise MissingResultError(f"no stage of {run} has taken a step yet; look again once one has")
    here = next((one for one in stages if one.name == name), trained[-1])
    if not here.steps:
        raise MissingResultError(
            f"{name} has taken no step yet: {run} has no stages/{name}/metrics.jsonl"
        )
    return stage_facts(run, here), _before(run, here, stages)


def _before(run: Path, here: StageResults, stages: list[StageResults]) -> StageFacts | None:
    place = stages.index(here)
    if place == 0 or not stages[place - 1].steps:
        return None
    return stage_facts(run, stages[place - 1])
