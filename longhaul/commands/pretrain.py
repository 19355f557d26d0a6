# SPDX-License-Identifier: Apache-2.0
"""`longhaul pretrain`: train one stage."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.files.writable import require_file
from longhaul.options import Verify, require_device
from longhaul.run_folder.lock import in_use
from longhaul.terminal.console import held_back, loading, output_to
from longhaul.terminal.messages import next_command, note, resumable
from longhaul.terminal.next_commands import OnCluster
from longhaul.terminal.progress import Watched, progress
from recipes.shipped.table import ROWS
from recipes.spec.cluster import CLUSTER
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
    ladder: Annotated[str, typer.Option(help="The ladder of the stage.")] = "",
    stage: Annotated[str, typer.Option(help="The stage, by its length, such as 64K.")] = "",
    nodes: Annotated[
        int | None, typer.Option(help="Nodes to lay --card out on.", show_default="1")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Cluster file of these nodes.", show_default=CLUSTER)
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
    verify: Verify = None,
) -> None:
    """Train one stage. Overrides follow as KEY=VALUE, for example trainer.max_steps=20."""
    combined = bool(card or ladder or stage)
    if bool(factory) + (yaml is not None) + combined != 1:
        raise ValueError(
            "name one recipe: --factory NAME or --yaml FILE, or --card with --ladder and --stage"
        )
    if not combined and (nodes is not None or cluster is not None):
        raise ValueError(
            "--nodes and --cluster apply only to --card; a recipe that has its layout takes the "
            "override trainer.num_nodes=N, so leave them out"
        )
    require_device(device)
    if yaml is not None and not yaml.is_file():
        raise ValueError(
            f"--yaml {yaml} is not a file; `longhaul show NAME --to-yaml FILE` writes one to change"
        )
    if to_yaml is not None:
        require_file(to_yaml, "--to-yaml")
    row, row_notes = None, list[str]()
    if factory:
        lookup("recipe", factory, ROWS)
    elif combined:
        from recipes.shipped import select

        row = select.choose(card, ladder, stage, nodes=nodes, cluster_name=cluster, device=device)
        row_notes = list(select.notes(row))
    with loading("NeMo and Megatron-Core"):
        from longhaul.jobs import records, stage_checks, training
        from longhaul.run_folder.places import require_places
        from longhaul.run_folder.undamaged import require_undamaged
        from recipes.resolved import overrides, read, yaml_file
        from recipes.resolved.check import notes
        from recipes.resolved.stage import ResolvedStage
        from recipes.shipped import factories
        from slurm.experiment import commands, run_in_order

        if row is not None:
            recipe = row()
        else:
            recipe = factories.recipe_named(factory) if yaml is None else yaml_file.read(yaml)
        if rope:
            recipe = overrides.with_rope(recipe, rope)
        if verify is False:
            recipe.resume.verify = False
        recipe = overrides.override(recipe, context.args)
        overrides.on_device(recipe, device)
    shipped = ROWS[factory].layout.world_size if factory else 0
    fewer = stage_checks.fewer_ranks(ResolvedStage.of(recipe), shipped)
    for words in (*row_notes, *fewer, *notes(recipe)):
        note(f"note: {words}")
    if to_yaml is not None:
        yaml_file.write(recipe, to_yaml)
        typer.echo(to_yaml)
        return
    read.absolute(recipe)
    require_places(recipe)
    resolved = ResolvedStage.of(recipe)
    folder = resolved.folder
    several = _several_nodes(recipe, row, from_file=yaml is not None)
    if dryrun:
        typer.echo(yaml_file.dump(recipe))
        typer.echo(f"# {stage_checks.summary(resolved)}")
        if several:
            typer.echo(f"# {several}")
            return
        job = training.training_job(resolved)
        with held_back():
            lines = commands(recipe.log.name, [job], folder / "launch")
        for line in lines:
            typer.echo(f"# {line}")
        return
    if several:
        raise ValueError(several)
    job = training.training_job(resolved)
    stage_checks.require_device(resolved)
    stage_checks.require_inputs(resolved)
    stage_checks.require_start(resolved)
    stage_checks.require_same(resolved)
    for words in require_undamaged([resolved], verify):
        note(f"note: {words}")
    with in_use(folder):
        records.record(resolved, start=str(recipe.resume.start or "scratch"))
        log = folder / "output.log"
        watched = Watched(
            resolved.name, resolved.steps, resolved.metrics, resolved.tokens_per_batch
        )
        note(f"the ranks write to {folder / 'launch'}")
        with resumable(), output_to(log) as console, progress(console, [watched]):
            run_in_order(recipe.log.name, [job], folder / "launch", console.print)
    typer.echo(folder)
    if folder.parent.name == "stages":
        run = os.path.relpath(folder.parent.parent)
        command = ["longhaul", "evaluate", "--run", run, "--stage", folder.name]
        next_command(command, "evaluate loss by position and passkeys of its last checkpoint")


def _several_nodes(recipe: "nemo_run.Partial", planned: "Row | None", *, from_file: bool) -> str:
    """Return how to run a recipe that is laid out on several nodes; empty for this machine's.

    Overrides of this command are left to the user, since some are for the layout on these nodes.
    So are the changes of a file, since only ladders are submitted to a cluster.
    """
    nodes = int(recipe.trainer.num_nodes)
    if nodes == 1:
        return ""
    said = (
        f"{recipe.log.name} is laid out on {nodes} nodes of {recipe.trainer.devices} and this "
        "machine is one; "
    )
    shipped = ROWS.get(recipe.log.name)
    if planned is not None:
        command = OnCluster(
            card=planned.card, ladder=planned.ladder, stage=planned.stage, cluster=planned.cluster,
            nodes=planned.nodes,
        )  # fmt: skip
    elif shipped is not None:
        command = OnCluster(
            card=shipped.card, ladder=shipped.ladder, stage=shipped.stage, cluster=shipped.cluster,
            nodes=None if nodes == shipped.nodes else nodes,
        )  # fmt: skip
    else:
        return (
            f"{said}a recipe file cannot be submitted to a cluster, only the ladders that "
            "`longhaul recipes` lists and their cards can"
        )
    explained = f" ({command.explained})" if command.explained else ""
    file = "a recipe file cannot be submitted; as shipped, on a cluster: "
    return f"{said}{file if from_file else 'on a cluster: '}{command.command}{explained}"
