# SPDX-License-Identifier: Apache-2.0
"""`longhaul run --executor slurm`: submit a ladder as a chain of jobs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from data.store import ONLY_SOURCE
from eval.harness.tasks import require_harness
from eval.run_folder import write_json
from longhaul.defaults import default
from longhaul.jobs import ladder_run, suite_data
from longhaul.jobs.cluster_checks import folders, require_complete, ruler_folders, with_names
from longhaul.jobs.git_tree import uncommitted
from longhaul.jobs.on_ranks import OnRanks
from longhaul.jobs.store_source import documents_of
from longhaul.pages import ladder_table
from longhaul.terminal.console import held_back, loading
from longhaul.terminal.messages import next_command, note
from recipes.shipped.machines import Machines
from recipes.spec.cluster import CLUSTER
from recipes.spec.gate import gate_from
from recipes.spec.trackers import require_trackers
from slurm.cluster_file import load
from slurm.nameable import require_nameable

if TYPE_CHECKING:
    import nemo_run

    from recipes.shipped.row import Row


def run_on_cluster(
    plan: ladder_run.LadderRun,
    words: Sequence[str],
    asked: Machines,
    *,
    account: str,
    partition: str,
    on_ranks: OnRanks,
    dryrun: bool,
    row: "Row | None" = None,
    change: "Callable[[nemo_run.Partial], nemo_run.Partial] | None" = None,
    source: Sequence[str] = (),
    prepare_jobs: int | None = None,
    tokenizer: str | None = None,
    export: Path | None = None,
    gate: str = "",
    evaluated: bool = True,
) -> None:
    """Submit the chain and print its jobs; with `dryrun` print the scripts and submit nothing.

    The only stage may be given as a `row`; `change` is applied to the recipes before overrides.
    """
    cluster = asked.cluster or CLUSTER
    file = with_names(load(cluster), default("account", account), default("partition", partition))
    # In a container or behind a tunnel ranks have packages of their own.
    here = file.container is None and file.tunnel.kind != "ssh"
    require_trackers(on_ranks.track, here=here)
    plan = _with_gates(plan, gate)
    trains_alone = not evaluated and not plan.store.exists() and plan.card.hf_id is not None
    documents = None if trains_alone else documents_of(plan, source, tokenizer, prepare_jobs)
    in_container, through_ssh = file.container is not None, file.tunnel.kind == "ssh"
    require_nameable(plan.run, in_container=in_container, through_ssh=through_ssh)
    with_suites = evaluated and bool(plan.ladder.suites)
    read = []
    if with_suites:
        require_harness()
        suite_data.require_same_caches(file)
        suite_data.require_harness_of(file)
        read += suite_data.folders(plan)
    if evaluated:
        read += ruler_folders(plan)
    require_complete(file, [*folders(plan, documents, export), *read])
    notes = uncommitted()
    with loading("NeMo and Megatron-Core"):
        from longhaul.jobs import (
            chain_ruler,
            chain_suites,
            evaluation,
            local_chain,
            records,
            slurm_chain,
            stage_checks,
            submission_checks,
        )
        from longhaul.jobs.job_times import require_time
        from longhaul.run_folder.places import require_places, require_room
        from longhaul.run_folder.undamaged import require_checkpoints
        from slurm.executors import require_reached
        from slurm.experiment import scripts, submit

        if file.tunnel.kind == "ssh":
            require_reached(file)
        known = file.hardware is not None and not asked.on_cpu
        asked = replace(asked, cluster=cluster if known else "")
        rows = [row] if row is not None else ladder_run.rows(plan, asked, submitted=True)
        resolved = local_chain.stages(plan, rows, words, asked.device, change)
        stages = [on_ranks.given_to(stage.planned(plan.card, file.hardware)) for stage in resolved]
        if file.hardware is None and any(stage.layout.device == "cuda" for stage in stages):
            notes = [*notes, f"{cluster} states no hardware; layouts are planned for {CLUSTER}"]
        if documents is None and plan.store.exists():
            local_chain.require_store(stages, evaluated=evaluated, packed=not dryrun)
            if evaluated:
                _require_short(plan, min(stage.trained_length for stage in stages))
        if documents is not None:
            named = documents.source if isinstance(documents.source, dict) else {ONLY_SOURCE}
            for stage in stages:
                stage_checks.require_sources(stage, set(named))
        slurm_chain.require_evaluations(plan, stages)
        require_time(stages, file)
        for stage in stages:
            stage_checks.require_same(stage)
        standing = [
            *local_chain.standing(stages),
            *on_ranks.notes(stages, submitted=True),
            *evaluation.describe(stages, plan.evaluation),
        ]
        if not dryrun:
            for stage in stages:
                require_places(stage.recipe)
            require_room(stages, plan.card)
            submission_checks.require_idle(plan, file)
            if stages[0].recipe.resume.start is not None:
                stage_checks.require_start(stages[0])
            notes = [*notes, *require_checkpoints(stages, plan.verify)]
            if evaluated:
                tokenizer = None if documents is None else documents.tokenizer
                chain_ruler.require_samples(plan, stages, tokenizer)
                chain_suites.require_suites(plan, stages, tokenizer)
            local_chain.write_records(plan, stages)
            for stage in stages:
                records.record_submission(stage, cluster)
            there = [folder.path for folder in read if folder.path.exists()]
            submission_checks.require_shared(plan, file, there)
        jobs = slurm_chain.jobs(
            plan, stages, file, documents=documents, export=export, evaluated=evaluated,
            scored=[*chain_suites.jobs_left(plan, stages), *chain_ruler.jobs_left(plan, stages)]
            if evaluated
            else (),
            cache=suite_data.caches() if with_suites else {},
        )  # fmt: skip
    for words_ in notes if dryrun else (*notes, *standing):
        note(f"note: {words_}")
    ladder_table.describe(plan, stages)
    if dryrun:
        for words_ in standing:
            typer.echo(f"# {words_}")
    if not jobs:
        typer.echo("nothing is left to do")
        return
    if dryrun:
        with held_back():
            texts = scripts(plan.name, jobs, plan.run / "launch")
        for name, script in texts.items():
            typer.echo(f"# ---- {name}\n{script}")
        chain = "1 job" if len(jobs) == 1 else f"{len(jobs)} jobs, each after the one before"
        submitted = "it is submitted" if len(jobs) == 1 else "they are submitted"
        note(f"{chain}; without --dryrun {submitted}")
        return
    with held_back("submitting"):
        numbers = submit(plan.name, jobs, plan.run / "launch")
    write_json(plan.run / "launch" / "jobs.json", numbers)
    for name, number in numbers.items():
        typer.echo(f"{number}  {name}")
    next_command(["longhaul", "status", plan.run], "show its progress")


def _require_short(plan: ladder_run.LadderRun, length: int) -> None:
    """Raise ValueError if a gate bounds the loss of short documents and the store has none."""
    from data.store import Manifest
    from eval.loss.short_loss import FEWEST_TOKENS, short_documents

    bounded = [
        name for name, stage in plan.chosen if stage.gate.short is not None and plan.before(name)
    ]
    if bounded and not short_documents(Manifest.load(plan.store), length):
        raise ValueError(
            f"the gate of {bounded[0]} bounds the loss of short documents, and {plan.store} has no "
            f"held-out document of {FEWEST_TOKENS} to {length:,} tokens; leave out short, or "
            "prepare a store that has them"
        )


def _with_gates(plan: ladder_run.LadderRun, words: str) -> ladder_run.LadderRun:
    stages = tuple(
        replace(stage, gate=gate_from(words, stage.gate)) for stage in plan.ladder.stages
    )
    at = None if plan.only is None else plan.ladder.stages.index(plan.only)
    only = None if at is None else stages[at]
    return replace(plan, ladder=replace(plan.ladder, stages=stages), only=only)
