# SPDX-License-Identifier: Apache-2.0
"""`longhaul clusters`: the cluster files there are, and what one of them still lacks."""

from typing import Annotated

import typer

from longhaul.cluster_checks import lacking
from recipes import cluster
from recipes.units import GiB
from slurm.cluster_file import ClusterFile, load

app = typer.Typer(
    help="List the cluster files, or check one.", invoke_without_command=True, no_args_is_help=False
)


@app.callback()
def clusters(context: typer.Context) -> None:
    """List the shipped cluster files."""
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table

    from longhaul.console import fitted

    def table(without: object) -> Table:
        made = Table(box=None)
        for column in ("name", "executor", "GPUs of a node", "host", "links, GB/s", "FP8"):
            made.add_column(column)
        for name in ["local", *cluster.names()]:
            made.add_row(*_cells(load(name)))
        return made

    console, made, _ = fitted(table, ())
    console.print(made)
    typer.echo(f"files: {cluster.FOLDER}; copy template.yaml for a cluster of your own")


def _cells(file: ClusterFile) -> tuple[str, ...]:
    if file.hardware is None:
        return file.name, file.executor, "this machine", "", "", ""
    machine = file.hardware
    return (
        file.name,
        file.executor,
        f"{machine.gpus_per_node} x {machine.gpu.name}",
        f"{machine.host_memory_gib:,.0f} GiB",
        f"{machine.nvlink_gbps:g} fast, {machine.network_gbps:g} network",
        "yes" if machine.gpu.fp8_tflops else "no",
    )


@app.command()
def check(
    file: Annotated[str, typer.Argument(help="A cluster file: a shipped name or a path.")],
) -> None:
    """Read a cluster file and say what a launch would still lack; exit with 1 where it would."""
    found = load(file)
    typer.echo(f"{found.name}: {_sentence(found)}")
    lines = lacking(found)
    for line in lines:
        typer.echo(f"FAIL  {line}")
    if lines:
        raise typer.Exit(1)
    typer.echo("ok    everything a launch needs is said")


def _sentence(file: ClusterFile) -> str:
    if file.hardware is None:
        return f"executor {file.executor}, no hardware to plan for"
    machine = file.hardware
    return (
        f"executor {file.executor}, {machine.gpus_per_node} x {machine.gpu.name} a node, "
        f"{machine.gpu_bytes / GiB:.1f} GiB each"
    )
