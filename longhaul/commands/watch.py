# SPDX-License-Identifier: Apache-2.0
"""`longhaul watch`: follow a run while it trains: progress, speed, memory and findings."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from eval.run_folder import plain
from longhaul.defaults import default
from longhaul.health.alert import Alerts, require_alert
from longhaul.options import Alert, Json, RunOption, RunOrStage, print_json, run_of
from longhaul.pages.watch_page import Changes, content, page
from longhaul.run_folder.run_view import RunView, RunWatch, run_and_stage
from longhaul.terminal.console import plain_console
from longhaul.terminal.messages import note
from longhaul.terminal.progress import PLAIN_EVERY_SECONDS
from recipes.spec.finding import Finding

POLL_SECONDS = 2.0
POLL_SLURM_SECONDS = 15.0
"""Time between two looks; longer where each asks Slurm."""
IDLE_LOOKS = 2
"""Looks at a run that nothing works on after which it has ended: jobs follow one another."""


def watch(
    given: RunOrStage = None,
    run: RunOption = None,
    stage: Annotated[
        str, typer.Option(help="A stage of the run.", show_default="all of them")
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    alert: Alert = "",
    as_json: Json = False,
) -> None:
    """Follow a run while it trains: progress, speed, memory and findings; ends with the run."""
    run = run_of(given, run)
    alert = default("alert", alert)
    require_alert(alert)
    run, stage = run_and_stage(run, stage)
    watched = RunWatch(run, stage)
    view = watched.look()
    alerts = Alerts(alert, note)
    told: set[tuple[str, object]] = set()
    if once:
        _alert(alerts, told, view)
        _show_once(view, as_json=as_json)
        alerts.close()
        return
    changes, idle = Changes(PLAIN_EVERY_SECONDS), 0
    console = plain_console()
    try:
        with _live(console, as_json=as_json) as live:
            while True:
                _alert(alerts, told, view)
                _show(view, changes, console, live, as_json=as_json)
                idle = 0 if view.is_at_work else idle + 1
                if idle >= IDLE_LOOKS:
                    break
                asked = view.state is not None and view.state.jobs
                time.sleep(POLL_SLURM_SECONDS if asked else POLL_SECONDS)
                view = watched.look()
    except KeyboardInterrupt:
        note("stopped watching; the run goes on" if view.is_at_work else "stopped watching")
        raise typer.Exit(0) from None
    finally:
        alerts.close()
    done = bool(view.stages) and all(one.state.state == "done" for one in view.stages)
    if not as_json:
        typer.echo("the run has ended" if done else "nothing works on this run any more")
    raise typer.Exit(0 if done else 1)


@contextmanager
def _live(console: Console, *, as_json: bool) -> Iterator[Live | None]:
    """Yield a page that is redrawn, on a terminal; None in a pipe."""
    if as_json or not console.is_terminal:
        with nullcontext():
            yield None
        return
    with Live(
        console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False,
        vertical_overflow="crop",
    ) as live:  # fmt: skip
        yield live


def _show(
    view: RunView, changes: Changes, console: Console, live: Live | None, *, as_json: bool
) -> None:
    if live is not None:
        live.update(page(view, console), refresh=True)
        return
    lines = list(changes.lines(view, time.monotonic()))
    if as_json:
        if lines:
            typer.echo(json.dumps(plain(content(view)), allow_nan=False, default=str))
        return
    for line in lines:
        typer.echo(line)


def _show_once(view: RunView, *, as_json: bool) -> None:
    if as_json:
        print_json(content(view))
        return
    console = plain_console()
    if console.is_terminal:
        console.print(page(view, console))
        return
    for line in Changes(0.0).lines(view, 0.0):
        typer.echo(line)


def _alert(alerts: Alerts, told: set[tuple[str, object]], view: RunView) -> None:
    """Have the alert command called for the findings that are new; one that returns is new."""
    current: dict[tuple[str, object], Finding] = {
        (name, finding.key): finding for name, finding in view.all_findings
    }
    for key, finding in current.items():
        if key not in told:
            where = {"run": str(view.run), **({"stage": key[0]} if key[0] else {})}
            alerts.send({**where, "time": time.time(), "state": "begins", **finding.content()})
    told.clear()
    told.update(current)
