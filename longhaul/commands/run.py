# SPDX-License-Identifier: Apache-2.0
"""`longhaul run`: train a whole ladder, from documents to the report."""

import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.files.writable import require_folder
from longhaul.defaults import default, planned_cluster
from longhaul.jobs import ladder_run
from longhaul.jobs.on_ranks import OnRanks
from longhaul.jobs.profile import require_profile_of
from longhaul.options import (
    WRITTEN_WHEN_STARTED,
    Account,
    Alert,
    Cluster,
    DebugComm,
    EvalEvery,
    EvaluationContextParallel,
    EvaluationPipelineParallel,
    EvaluationTensorParallel,
    Executor,
    Gpus,
    MachineLayout,
    Partition,
    Profile,
    Track,
    Verify,
    evaluation_interval,
    require_device,
    require_executor,
    trackers,
)
from longhaul.pages import ladder_table
from longhaul.pages.store_page import show_store
from longhaul.run_folder.lock import in_use, require_unused
from longhaul.terminal.console import held_back, loading, output_to
from longhaul.terminal.messages import note, resumable
from longhaul.terminal.progress import Watched, progress
from longhaul.terminal.results import announcing_evaluations
from recipes.shipped.machines import Machines, require_no_machines
from recipes.spec.naming import stage_folder

if TYPE_CHECKING:
    from recipes.shipped.row import Row


def run(
    context: typer.Context,
    ladder: Annotated[str, typer.Option(help="The ladder to train, such as tiny.")],
    card: Annotated[
        str | None, typer.Option(help="The model card; needed where several fit the ladder.")
    ] = None,
    stage: Annotated[
        str, typer.Option(help="Only this stage, by its length, such as 64K.", show_default="all")
    ] = "",
    executor: Executor = "local",
    cluster: Cluster = "",
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of each stage.", show_default="the recipes'")
    ] = None,
    gpus: Gpus = None,
    layout: MachineLayout = "",
    account: Account = "",
    partition: Partition = "",
    source: Annotated[
        list[str] | None,
        typer.Option(
            help="Documents to prepare a store from, as a first job; several as NAME=SOURCE.",
            show_default=False,
        ),
    ] = None,
    prepare_jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Jobs of an array that share that work.", show_default="1 job"),
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
        str,
        typer.Option(help="Thresholds instead of the ladder's: rise=0.1, or a list with commas."),
    ] = "",
    device: Annotated[
        str | None, typer.Option(help="cpu: run on CPU ranks, overriding the recipes.")
    ] = None,
    eval_every: EvalEvery = None,
    track: Track = None,
    eval_tp: EvaluationTensorParallel = None,
    eval_cp: EvaluationContextParallel = None,
    eval_pp: EvaluationPipelineParallel = None,
    alert: Alert = "",
    profile: Profile = None,
    debug_comm: DebugComm = False,
    verify: Verify = None,
    dryrun: Annotated[
        bool, typer.Option("--dryrun", help="Print what would run; start nothing.")
    ] = False,
) -> None:
    """Train every stage of a ladder in order, evaluate them all, and build the report.

    An interrupted run resumes from its last checkpoint. KEY=VALUE overrides apply to every stage.
    """
    from recipes.shipped.select import short, stage_of

    submits = executor == "slurm"
    on_ranks = OnRanks(
        evaluate_every=evaluation_interval(eval_every),
        alert=default("alert", alert),
        profile=profile,
        debug_comm=debug_comm,
        track=trackers(track, here=not submits),
    )
    on_ranks.require(here=not submits)
    require_device(device)
    require_executor(
        executor, account=account, partition=partition, source=source, tokenizer=tokenizer,
        export=export, gate=gate, **{"prepare-jobs": prepare_jobs},
    )  # fmt: skip
    named = default("cluster", cluster) if submits else planned_cluster(cluster)
    asked = Machines(nodes=nodes, gpus=gpus, layout=layout, cluster=named, device=device)
    if asked.on_cpu and not submits:
        require_no_machines(replace(asked, cluster=cluster))
        asked = replace(asked, cluster="")
    chosen, model = ladder_run.choose(ladder, card, stage)
    only = stage_of(chosen, stage) if stage else None
    plan = replace(
        ladder_run.plan(chosen, model, out, store, only=only, verify=verify),
        evaluation=ladder_run.EvaluationParallel(eval_tp, eval_cp, eval_pp),
    )
    ladder_run.require_own_folder(plan)
    ladder_run.require_no_pipeline(plan)
    if submits:
        from longhaul.commands.run_on_slurm import run_on_cluster

        if not dryrun:
            require_folder(plan.run, "--out")
        # The jobs take no such lock: it is released once they are submitted.
        with nullcontext() if dryrun else in_use(plan.run):
            run_on_cluster(
                plan, context.args, asked, account=account, partition=partition,
                source=source or (), prepare_jobs=prepare_jobs, tokenizer=tokenizer, export=export,
                gate=gate, on_ranks=on_ranks, dryrun=dryrun,
            )  # fmt: skip
        return
    require_folder(plan.run, "--out")
    if store is not None:
        ladder_run.require_store_of_published(plan)
    rows = ladder_run.rows(plan, asked, moved=bool(cluster))
    for row in rows:
        ladder_run.require_here(row, nodes, cluster)
        for said in short(row):
            note(f"note: {said}")
    with nullcontext() if dryrun else in_use(plan.run):
        _run_here(plan, rows, context.args, device, on_ranks, dryrun=dryrun)


def _run_here(
    plan: ladder_run.LadderRun,
    rows: "Sequence[Row]",
    words: Sequence[str],
    device: str | None,
    on_ranks: OnRanks,
    *,
    dryrun: bool,
) -> None:
    """Run what is left of the ladder on this machine, or print it."""
    if not dryrun:
        require_unused(plan.run / "eval")
        ladder_run.require_store_of_published(plan)
        ladder_run.require_gpus_of(rows, device, words)
        for row in rows:
            require_unused(stage_folder(plan.run, row.name))
        require_profile_of(rows, plan.run, on_ranks.profile, words)
        made = ladder_run.make_missing_store(plan)
        if made is not None:
            show_store(made)
    with loading("NeMo and Megatron-Core"):
        from longhaul.jobs import (
            chain_ruler,
            chain_suites,
            evaluation,
            local_chain,
            stage_checks,
        )
        from longhaul.run_folder.places import require_places, require_room
        from longhaul.run_folder.undamaged import require_undamaged
        from slurm.experiment import commands, run_in_order

        stages = [
            on_ranks.given_to(stage) for stage in local_chain.stages(plan, rows, words, device)
        ]
        several = local_chain.several_nodes(plan, stages, rows)
        if several and not dryrun:
            raise ValueError(several)
        for stage in stages:
            require_places(stage.recipe)
        local_chain.require(stages, started=not dryrun)
        local_chain.require_evaluation(plan, stages, started=not dryrun)
        if not dryrun:
            require_room(stages, plan.card)
            chain_ruler.require_samples(plan, stages)
            chain_suites.require_suites(plan, stages)
        notes = [] if dryrun else require_undamaged(stages, plan.verify)
        notes = [*stage_checks.smaller_gpu(stages[0], rows[0]), *notes]
        standing = [
            *local_chain.standing(stages),
            *on_ranks.notes(stages),
            *evaluation.describe(stages[-1:], plan.evaluation),
        ]
    for said in notes if dryrun else (*notes, *standing):
        note(f"note: {said}")
    ladder_table.describe(plan, stages)
    scored = [*chain_suites.model_jobs(plan, stages), *chain_ruler.model_jobs(plan, stages)]
    if dryrun:
        start = dict(stage_checks.not_there(stages[0])).get("resume.start")
        for said in (*ladder_run.missing_store(plan), *filter(None, [start]), *standing):
            typer.echo(f"# {said}")
        if several:
            typer.echo(f"# {several}")
            return
        jobs = local_chain.jobs(
            plan, stages, record=False, scored=chain_suites.local_jobs(plan, scored),
        )  # fmt: skip
        with held_back():
            lines = commands(plan.name, jobs, plan.run / "launch") if jobs else []
        if lines:
            typer.echo(f"# {WRITTEN_WHEN_STARTED}")
        for line in lines or ["nothing is left to do"]:
            typer.echo(line)
        return
    with ExitStack() as held:
        # The evaluation at the end writes where `longhaul evaluate` does.
        for folder in (*(stage.folder for stage in stages), plan.run / "eval"):
            held.enter_context(in_use(folder))
        jobs = local_chain.jobs(
            plan, stages, record=True, scored=chain_suites.local_jobs(plan, scored),
        )  # fmt: skip
        watched = [
            Watched(stage.name, stage.steps, stage.metrics, stage.tokens_per_batch)
            for stage in stages
        ]
        if jobs:
            note(f"the ranks write to {plan.run / 'launch'}")
            with (
                resumable(saves=[stage.checkpoints for stage in stages]),
                output_to(plan.run / "output.log") as console,
                progress(console, watched, after="evaluating"),
                announcing_evaluations(console, plan.run, [stage.name for stage in stages]),
            ):
                run_in_order(plan.name, jobs, plan.run / "launch", console.print)
    from longhaul.commands.report import report

    report(run=Path(os.path.relpath(plan.run)))
