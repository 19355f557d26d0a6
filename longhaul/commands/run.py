# SPDX-License-Identifier: Apache-2.0
"""`longhaul run`: train a whole ladder, from documents to the report."""

import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from data.files.writable import require_folder
from longhaul.jobs import ladder_run
from longhaul.options import Verify, require_device
from longhaul.pages import ladder_table
from longhaul.pages.store_page import show_store
from longhaul.run_folder.lock import in_use, require_unused
from longhaul.terminal.console import loading, output_to
from longhaul.terminal.messages import note, resumable
from longhaul.terminal.progress import Watched, progress
from recipes.spec.cluster import CLUSTER


def run(
    context: typer.Context,
    ladder: Annotated[str, typer.Option(help="The ladder to train, such as tiny.")],
    card: Annotated[
        str | None, typer.Option(help="The model card; needed where several fit the ladder.")
    ] = None,
    stage: Annotated[
        str, typer.Option(help="Only this stage, by its length, such as 64K.", show_default="all")
    ] = "",
    executor: Annotated[
        str, typer.Option(help="Where to run: local, or slurm with --cluster.")
    ] = "local",
    cluster: Annotated[
        str, typer.Option(help="Cluster file: a shipped name or a path.", show_default=CLUSTER)
    ] = "",
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of each stage.", show_default="the recipes'")
    ] = None,
    account: Annotated[str, typer.Option(help="Slurm's account, instead of the file's.")] = "",
    partition: Annotated[str, typer.Option(help="Slurm's partition, instead of the file's.")] = "",
    source: Annotated[
        str | None, typer.Option(help="Documents to prepare a store from, as a first job.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer of that store.", show_default="the card's")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Export the last stage there, as a last job.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder.", show_default="runs/...")] = None,
    store: Annotated[
        Path | None, typer.Option(help="Token store.", show_default="stores/CARD")
    ] = None,
    gate: Annotated[
        str, typer.Option(help="Thresholds instead of the ladder's: passkey=0.9 or rise=none.")
    ] = "",
    device: Annotated[
        str | None, typer.Option(help="cpu: run on CPU ranks, overriding the recipes.")
    ] = None,
    verify: Verify = None,
    dryrun: Annotated[
        bool, typer.Option("--dryrun", help="Print what would run; start nothing.")
    ] = False,
) -> None:
    """Train every stage of a ladder in order, evaluate them all, and build the report.

    An interrupted run resumes from its last checkpoint. KEY=VALUE overrides apply to every stage.
    """
    from recipes.shipped.select import stage_of

    planned = executor == "slurm" and nodes is not None
    chosen, model = ladder_run.choose(ladder, card, planned=planned)
    require_device(device)
    only = stage_of(chosen, stage) if stage else None
    plan = ladder_run.plan(chosen, model, out, store, only=only, verify=verify)
    if executor == "slurm":
        from longhaul.commands.run_on_slurm import run_on_cluster

        if not dryrun:
            require_folder(plan.run, "--out")
        # The jobs take no such lock: it is released once they are submitted.
        with nullcontext() if dryrun else in_use(plan.run):
            run_on_cluster(
                plan, context.args, cluster=cluster or CLUSTER, nodes=nodes, account=account,
                partition=partition, source=source, tokenizer=tokenizer, export=export, gate=gate,
                device=device, dryrun=dryrun,
            )  # fmt: skip
        return
    if executor != "local":
        raise ValueError(f"executor {executor!r} is unknown; expected local or slurm")
    given = {
        "--cluster": cluster, "--nodes": nodes, "--account": account, "--partition": partition,
        "--source": source, "--tokenizer": tokenizer, "--export": export,
        "--gate": gate,
    }  # fmt: skip
    if unused := [name for name, value in given.items() if value]:
        raise ValueError(
            f"{' and '.join(unused)} cannot go with --executor local; add --executor slurm, or "
            "leave it out"
        )
    require_folder(plan.run, "--out")
    with nullcontext() if dryrun else in_use(plan.run):
        _run_here(plan, context.args, device, dryrun=dryrun)


def _run_here(
    plan: ladder_run.LadderRun, words: Sequence[str], device: str | None, *, dryrun: bool
) -> None:
    """Run what is left of the ladder on this machine, or print it."""
    if not dryrun:
        require_unused(plan.run / "eval")
        made = ladder_run.make_missing_store(plan)
        if made is not None:
            show_store(made)
    with loading("NeMo and Megatron-Core"):
        from longhaul.jobs import local_chain
        from longhaul.run_folder.places import require_places
        from longhaul.run_folder.undamaged import require_undamaged
        from slurm.experiment import commands, run_in_order

        stages = local_chain.stages(plan, words, device)
        for stage in stages:
            require_places(stage.recipe)
        local_chain.require(stages, started=not dryrun)
        notes = [] if dryrun else require_undamaged(stages, plan.verify)
        standing = local_chain.standing(stages)
    for said in notes if dryrun else (*notes, *standing):
        note(f"note: {said}")
    ladder_table.describe(plan, stages)
    if dryrun:
        for said in standing:
            typer.echo(f"# {said}")
        jobs = local_chain.jobs(plan, stages, record=False)
        lines = commands(plan.name, jobs, plan.run / "launch") if jobs else []
        for line in lines or ["nothing is left to do"]:
            typer.echo(line)
        return
    with ExitStack() as held:
        # The evaluation at the end writes where `longhaul evaluate` does.
        for folder in (*(stage.folder for stage in stages), plan.run / "eval"):
            held.enter_context(in_use(folder))
        jobs = local_chain.jobs(plan, stages, record=True)
        watched = [
            Watched(stage.name, stage.steps, stage.metrics, stage.tokens_per_batch)
            for stage in stages
        ]
        if jobs:
            note(f"the ranks write to {plan.run / 'launch'}")
            with (
                resumable(),
                output_to(plan.run / "output.log") as console,
                progress(console, watched, after="evaluating"),
            ):
                run_in_order(plan.name, jobs, plan.run / "launch", console.print)
    from longhaul.commands.report import report

    report(run=Path(os.path.relpath(plan.run)))
