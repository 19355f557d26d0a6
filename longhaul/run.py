# SPDX-License-Identifier: Apache-2.0
"""`longhaul run`: a whole ladder, from documents to the report."""

import os
from pathlib import Path
from typing import Annotated

import typer

from longhaul.console import loading, output_to
from longhaul.options import require_device
from longhaul.progress import Watched, progress


def run(
    context: typer.Context,
    ladder: Annotated[str, typer.Option(help="The ladder to climb, as tiny.")],
    card: Annotated[
        str | None, typer.Option(help="The model card; needed where several fit the ladder.")
    ] = None,
    executor: Annotated[str, typer.Option(help="Where to run: local.")] = "local",
    out: Annotated[Path | None, typer.Option(help="Run folder.", show_default="runs/...")] = None,
    store: Annotated[
        Path | None, typer.Option(help="Token store.", show_default="stores/CARD")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu: run on CPU ranks whatever the recipes say.")
    ] = None,
    dryrun: Annotated[
        bool, typer.Option("--dryrun", help="Print what would run; start nothing.")
    ] = False,
) -> None:
    """Train every stage of a ladder in order, evaluate them all, and build the report.

    A run that was stopped goes on where it was. KEY=VALUE overrides apply to every stage.
    """
    from longhaul import ladder_run

    chosen, model = ladder_run.choose(ladder, card)
    if executor != "local":
        raise ValueError(f"executor {executor!r} is unknown; there is local")
    require_device(device)
    plan = ladder_run.plan(chosen, model, out, store)
    if not dryrun:
        ladder_run.require_store(plan)
    with loading("NeMo and Megatron-Core"):
        from longhaul import chain
        from slurm.launch import commands, run_in_order

        recipes = chain.recipes(plan, context.args, device)
        chain.require(recipes, started=not dryrun)
        jobs = chain.jobs(plan, recipes, record=not dryrun)
        lines = commands(plan.name, jobs, plan.run / "launch") if dryrun and jobs else []
    ladder_run.describe(plan, recipes)
    if dryrun:
        for line in lines or ["nothing is left to do"]:
            typer.echo(line)
        return
    log = plan.run / "output.log"
    watched = [
        Watched(recipe.log.name, int(recipe.trainer.max_steps), chain.metrics(recipe))
        for recipe in recipes
    ]
    if jobs:
        typer.echo(f"the ranks write to {plan.run / 'launch'}", err=True)
        with output_to(log) as console, progress(console, watched, after="evaluating"):
            run_in_order(plan.name, jobs, plan.run / "launch")
    from longhaul.report import report

    report(run=Path(os.path.relpath(plan.run)))
