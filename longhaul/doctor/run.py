# SPDX-License-Identifier: Apache-2.0
"""`longhaul doctor run`: the findings about a run's health, those that hold and earlier ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from longhaul.doctor.log import content as log_content
from longhaul.doctor.log import describe
from longhaul.doctor.logs.reader import logs_of
from longhaul.doctor.logs.reader import read as read_logs
from longhaul.findings.follow import RunWatch, finding_lines, progress_of
from longhaul.health.monitor import MetricsTail, Monitor
from longhaul.options import Json, RunOption, RunOrStage, print_json, run_of
from longhaul.run_folder.stage_named import run_and_stage
from longhaul.run_folder.state import StageState
from recipes.spec.finding import Finding, read
from recipes.spec.naming import counted, stage_folder

EVERY = 4
"""Steps between two rounds of checks of a run that recorded none; a finding lasts for more."""

ENDED = ("failed", "stopped")
"""States of a stage whose output is read."""


def run(
    given: RunOrStage = None,
    run: RunOption = None,
    stage: Annotated[
        str, typer.Option(help="A stage of the run.", show_default="all of them")
    ] = "",
    as_json: Json = False,
) -> None:
    """List what is and was wrong with a run: slow ranks, data, memory, loss, disks, logs."""
    run = run_of(given, run)
    folder, name = run_and_stage(run, stage)
    stages = [one for one in RunWatch(folder).look().stages if name in ("", one.name)]
    found = [(one, one.findings, _past(folder, one)) for one in stages]
    logs = {
        one.name: read_logs(paths)
        for one in stages
        if one.state in ENDED and (paths := logs_of(folder, one.name))
    }
    logs = {name: log for name, log in logs.items() if log.faults or log.error_like}
    if as_json:
        print_json(
            {
                "run": str(folder),
                "stages": [
                    {
                        "name": one.name,
                        "state": one.state,
                        "reason": one.reason,
                        "findings": _contents(holds),
                        "past_findings": _contents(past),
                        "log": log_content(logs[one.name]) if one.name in logs else None,
                    }
                    for one, holds, past in found
                ],
            }
        )
    else:
        for one, holds, past in found:
            typer.echo(f"{one.name}: {one.state}, step {progress_of(one)}")
            if one.reason and not any(one.reason in each.said for each in holds):
                typer.echo(f"  {one.reason}")
            for finding in holds:
                _show(finding)
            for finding in past:
                _show(finding, ended=True)
            if not holds and not past:
                typer.echo("  no finding")
            if one.name in logs:
                typer.echo("  the output of its ranks:")
                for line in describe(logs[one.name], folder):
                    typer.echo(f"    {line}")
    if any(holds for _, holds, _ in found):
        raise typer.Exit(1)


def _contents(found: Sequence[Finding]) -> list[dict[str, Any]]:
    return [finding.content() for finding in found]


def _show(finding: Finding, *, ended: bool = False) -> None:
    first, *more = finding_lines("", finding)
    typer.echo(f"  {'earlier: ' if ended else ''}{first}")
    for line in more:
        typer.echo(f"  {line}")
    if finding.documents:
        named = [f"{one.get('source')}:{one.get('document')}" for one in finding.documents]
        typer.echo(f"    {counted(len(named), 'document')}: {', '.join(named)}")


def _past(run: Path, stage: StageState) -> list[Finding]:
    """Return earlier findings; those of a run without a record follow from its metrics."""
    folder = stage_folder(run, stage.name)
    if read(folder):
        return [finding for finding in stage.past_findings if finding not in stage.findings]
    tail = MetricsTail(folder / "metrics.jsonl")
    tail.poll()
    lines, monitor = list(tail.lines), Monitor()
    begun = [
        finding
        for end in range(EVERY, len(lines) + EVERY, EVERY)
        for finding in monitor.check(lines[:end])[0]
    ]
    held = {finding.kind for finding in stage.findings}
    return [finding for finding in begun if finding.kind not in held]
