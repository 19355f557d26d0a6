# SPDX-License-Identifier: Apache-2.0
"""`longhaul pretrain`: train one stage."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.files.writable import require_file, require_folder
from longhaul.defaults import default, planned_cluster, run_of, store_of
from longhaul.jobs import ladder_run
from longhaul.jobs.on_ranks import OnRanks
from longhaul.jobs.profile import MOVING, require_profile_of
from longhaul.options import (
    WRITTEN_WHEN_STARTED,
    Account,
    Alert,
    Cluster,
    DebugComm,
    EvalEvery,
    Executor,
    Gpus,
    MachineLayout,
    Partition,
    Profile,
    StageLadder,
    StageLength,
    Track,
    Verify,
    evaluation_interval,
    require_device,
    require_executor,
    trackers,
)
from longhaul.run_folder.lock import in_use, require_unused
from longhaul.terminal.console import held_back, loading, output_to
from longhaul.terminal.messages import next_command, note, resumable
from longhaul.terminal.next_commands import submitted
from longhaul.terminal.progress import Watched, progress
from recipes.shipped.machines import (
    Machines,
    of_known_hardware,
    on_machines,
    require_no_machines,
)
from recipes.shipped.table import ROWS
from recipes.spec.naming import stage_folder
from recipes.spec.suggest import lookup

if TYPE_CHECKING:
    import nemo_run

    from recipes.shipped.row import Row


def pretrain(
    context: typer.Context,
    factory: Annotated[str, typer.Option(help="A shipped recipe, such as tiny_8k.")] = "",
    yaml: Annotated[Path | None, typer.Option(help="A recipe file from --to-yaml.")] = None,
    card: Annotated[
        str, typer.Option(help="A model card, with --ladder and --stage: any recipe.")
    ] = "",
    ladder: StageLadder = "",
    stage: StageLength = "",
    nodes: Annotated[int | None, typer.Option(help="Nodes.", show_default="1")] = None,
    gpus: Gpus = None,
    layout: MachineLayout = "",
    executor: Executor = "local",
    cluster: Cluster = "",
    account: Account = "",
    partition: Partition = "",
    out: Annotated[Path | None, typer.Option(help="Run folder.", show_default="runs/...")] = None,
    store: Annotated[
        Path | None, typer.Option(help="Token store.", show_default="stores/CARD")
    ] = None,
    to_yaml: Annotated[Path | None, typer.Option(help="Write the recipe; do not run it.")] = None,
    dryrun: Annotated[
        bool, typer.Option("--dryrun", help="Print the recipe and its command; do not run it.")
    ] = False,
    rope: Annotated[
        str,
        typer.Option(help="Rotate by METHOD[:KEY=VALUE,...] or a file, as in `longhaul rope`."),
    ] = "",
    device: Annotated[
        str | None, typer.Option(help="cpu: run on CPU ranks, overriding the recipe.")
    ] = None,
    eval_every: EvalEvery = None,
    alert: Alert = "",
    profile: Profile = None,
    debug_comm: DebugComm = False,
    track: Track = None,
    verify: Verify = None,
) -> None:
    """Train one stage. Overrides follow as KEY=VALUE, for example trainer.max_steps=20."""
    combined = bool(card or ladder or stage)
    if bool(factory) + (yaml is not None) + combined != 1:
        meant = next((word for word in context.args if word in ROWS), None)
        of_row = "" if meant is None else f"; to train {meant}: --factory {meant}"
        raise ValueError(
            "name one recipe: --factory NAME or --yaml FILE, or --card with --ladder and "
            f"--stage{of_row}"
        )
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
    require_executor(executor, account=account, partition=partition)
    sizes = {"nodes": nodes, "gpus": gpus, "layout": layout, "cluster": cluster}
    if yaml is not None:
        _require_file(yaml, executor, {**sizes, "out": out, "store": store})
    if to_yaml is not None:
        require_file(to_yaml, "--to-yaml")
        if submits:
            raise ValueError("--to-yaml writes and --executor slurm submits; take one of them")
    no_part = {
        "--eval-every": eval_every, "--alert": alert, "--profile": profile, "--track": track,
        "--debug-comm": debug_comm,
    }  # fmt: skip
    attached = [name for name, value in no_part.items() if value]
    if attached and to_yaml is not None:
        raise ValueError(
            f"{attached[0]} is not part of a recipe; leave it out with --to-yaml, and give it to "
            "the command that trains the file"
        )
    asked = Machines(
        nodes=nodes, gpus=gpus, layout=layout, device=device,
        cluster=default("cluster", cluster) if submits
        else planned_cluster(cluster) if combined
        else cluster,
    )  # fmt: skip
    if asked.on_cpu and not submits:
        require_no_machines(replace(asked, cluster=cluster))
    row, row_notes = None, list[str]()
    if factory:
        row = lookup("recipe", factory, ROWS)
        if asked.sized or asked.cluster:
            from recipes.shipped.select import short

            row = on_machines(row, _of_card(asked))
            row_notes = list(short(row))
    elif combined:
        from recipes.shipped import select

        row = select.choose(card, ladder, stage, _of_card(asked))
        ladder_run.require_own_import(row.card)
        row_notes = list(select.notes(row))
    if row is not None and not submits:
        ladder_run.require_here(row, nodes, cluster)
    if submits:
        assert row is not None
        for words in row_notes:
            note(f"note: {words}")
        _submit(
            row, context.args, asked, rope=rope, account=account, partition=partition, out=out,
            store=store, verify=verify, on_ranks=on_ranks, dryrun=dryrun,
        )  # fmt: skip
        return
    if row is not None and to_yaml is None and not dryrun:
        ladder_run.require_gpus_of([row], device, context.args)
        _require_places(row, context.args, out, store)
        require_profile_of([row], run_of(row.card, row.ladder, out), profile, context.args)
    with loading("NeMo and Megatron-Core"):
        from longhaul.jobs import local_chain, records, stage_checks, training
        from longhaul.run_folder.places import require_places, require_room
        from longhaul.run_folder.undamaged import require_undamaged
        from recipes.resolved import overrides, read, yaml_file
        from recipes.resolved.check import notes
        from recipes.resolved.stage import ResolvedStage
        from slurm.experiment import commands, run_in_order

        if row is None:
            assert yaml is not None
            recipe = yaml_file.read(yaml)
        else:
            recipe = _placed(row, out, store)
        if rope:
            recipe = overrides.with_rope(recipe, rope)
        if verify is False:
            recipe.resume.verify = False
        recipe = overrides.override(recipe, context.args)
        overrides.on_device(recipe, device)
    shipped = row.layout.world_size if row is not None and factory else 0
    fewer = stage_checks.fewer_ranks(ResolvedStage.of(recipe), shipped)
    smaller = stage_checks.smaller_gpu(ResolvedStage.of(recipe), row) if row is not None else ()
    for words in (*row_notes, *fewer, *smaller, *notes(recipe)):
        note(f"note: {words}")
    if to_yaml is not None:
        yaml_file.write(recipe, to_yaml)
        typer.echo(to_yaml)
        return
    read.absolute(recipe)
    require_places(recipe)
    resolved = on_ranks.given_to(ResolvedStage.of(recipe))
    standing = on_ranks.notes([resolved])
    folder = resolved.folder
    several = _several_nodes(recipe, row)
    if dryrun:
        missing = dict(stage_checks.not_there(resolved))
        named = [word.partition("=")[0] for word in context.args]
        for key in ("data.store" if store else "", *named):
            if key in missing:
                raise ValueError(missing[key])
        if "data.store" not in missing:
            local_chain.require_store([resolved], evaluated=False, packed=False)
        typer.echo(yaml_file.dump(recipe))
        for words in (stage_checks.summary(resolved), *standing, *missing.values()):
            typer.echo(f"# {words}")
        if several:
            typer.echo(f"# {several}")
            return
        job = training.training_job(resolved)
        with held_back():
            lines = commands(recipe.log.name, [job], folder / "launch")
        for line in (WRITTEN_WHEN_STARTED, *lines):
            typer.echo(f"# {line}")
        return
    if several:
        raise ValueError(several)
    job = training.training_job(resolved)
    stage_checks.require_device(resolved)
    local_chain.require_store([resolved], evaluated=False)
    for words in standing:
        note(f"note: {words}")
    stage_checks.require_start(resolved)
    stage_checks.require_same(resolved)
    if row is not None:
        require_room([resolved], row.card)
    for words in require_undamaged([resolved], verify):
        note(f"note: {words}")
    with in_use(folder):
        records.record(resolved, start=str(recipe.resume.start or "scratch"))
        log = folder / "output.log"
        watched = Watched(
            resolved.name, resolved.steps, resolved.metrics, resolved.tokens_per_batch
        )
        note(f"the ranks write to {folder / 'launch'}")
        stops = resumable(saves=[resolved.checkpoints])
        with stops, output_to(log) as console, progress(console, [watched]):
            run_in_order(recipe.log.name, [job], folder / "launch", console.print)
    typer.echo(folder)
    if folder.parent.name == "stages":
        run = os.path.relpath(folder.parent.parent)
        command = ["longhaul", "evaluate", "--run", run, "--stage", folder.name]
        also = "" if recipe.resume.start is None else " (--base: also of the model it started from)"
        next_command(command, f"evaluate loss by position and passkeys of its checkpoint{also}")


def _of_card(asked: Machines) -> Machines:
    """Return the machines for a row; CPU ranks are of no cluster, though one may run them."""
    return replace(asked, cluster="") if asked.on_cpu else of_known_hardware(asked)


def _require_places(row: "Row", words: Sequence[str], out: Path | None, store: Path | None) -> None:
    """Raise ValueError, before NeMo is loaded, for places that no override of the row changes."""
    if not any(word.startswith(MOVING) for word in words):
        run = run_of(row.card, row.ladder, out)
        require_folder(run, "--out")
        require_unused(stage_folder(run, row.stage_name))
    if not any(word.startswith("data.store") for word in words):
        place = store_of(row.card, store)
        if place.is_file():
            raise ValueError(f"--store {place} is a file; expected the folder of a store")


def _placed(row: "Row", out: Path | None, store: Path | None) -> "nemo_run.Partial":
    """Return the recipe of a row with its run folder and its store."""
    from recipes.nemo2.settings import place

    recipe = row()
    run_to, read_from = run_of(row.card, row.ladder, out), store_of(row.card, store)
    place(recipe, row.card, row.ladder, row.stage, run_to=run_to, store=read_from)
    return recipe


def _submit(
    row: "Row",
    words: Sequence[str],
    asked: Machines,
    *,
    rope: str,
    account: str,
    partition: str,
    out: Path | None,
    store: Path | None,
    verify: bool | None,
    on_ranks: OnRanks,
    dryrun: bool,
) -> None:
    """Submit the stage of a row as a job on the cluster, or print its script."""
    from longhaul.commands.run_on_slurm import run_on_cluster

    plan = ladder_run.plan(row.ladder, row.card, out, store, only=row.stage, verify=verify)

    def change(recipe: "nemo_run.Partial") -> "nemo_run.Partial":
        from recipes.resolved import overrides

        return overrides.with_rope(recipe, rope)

    if not dryrun:
        require_folder(plan.run, "--out")
        ladder_run.require_store_of_published(plan)
    with nullcontext() if dryrun else in_use(plan.run):
        run_on_cluster(
            plan, words, asked, account=account, partition=partition, dryrun=dryrun, row=row,
            change=change if rope else None, evaluated=False, on_ranks=on_ranks,
        )  # fmt: skip


def _require_file(yaml: Path, executor: str, options: dict[str, object]) -> None:
    """Raise ValueError for a recipe file that is not there, and for what it states itself."""
    if not yaml.is_file():
        raise ValueError(
            f"--yaml {yaml} is not a file; `longhaul show NAME --to-yaml FILE` writes one to change"
        )
    if executor == "slurm":
        raise ValueError(
            f"--yaml {yaml} trains on this machine only; submit --factory NAME, or --card with "
            "--ladder and --stage, with overrides KEY=VALUE"
        )
    given = [f"--{name}" for name, value in options.items() if value not in (None, "")]
    if given:
        raise ValueError(
            f"{' and '.join(given)} cannot go with --yaml, which states its layout and paths; "
            "leave them out, or change the file"
        )


def _several_nodes(recipe: "nemo_run.Partial", planned: "Row | None") -> str:
    """Return how to run a recipe that is laid out on several nodes; empty for this machine's.

    Overrides of this command are left to the user, since some are for the layout on these nodes.
    """
    nodes = int(recipe.trainer.num_nodes)
    if nodes == 1:
        return ""
    said = (
        f"{recipe.log.name} is laid out on {nodes} nodes of {recipe.trainer.devices} and this "
        "machine is one; "
    )
    if planned is None:
        return (
            f"{said}a recipe file cannot be submitted to a cluster; submit --factory NAME, or "
            "--card with --ladder and --stage, with overrides KEY=VALUE"
        )
    gpus = int(recipe.trainer.devices) * nodes
    command = submitted(planned, gpus, planned.stage)
    explained = f" ({command.explained})" if command.explained else ""
    return f"{said}on a cluster: {command.command}{explained}"
