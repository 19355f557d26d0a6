# SPDX-License-Identifier: Apache-2.0
"""`longhaul clusters`: the cluster files there are, and what one of them still lacks."""

from pathlib import Path
from typing import Annotated

import typer

from recipes import cluster
from recipes.units import GiB
from slurm.cluster_file import PLACEHOLDER, ClusterFile, load

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
    lacking = list(_lacking(found))
    for line in lacking:
        typer.echo(f"FAIL  {line}")
    if lacking:
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


def _lacking(file: ClusterFile) -> "list[str]":
    """Return a sentence for each thing that only the user knows and has not said."""
    found = []
    if file.executor == "slurm":
        if file.slurm.account == PLACEHOLDER:
            found.append("slurm.account is CHANGE_ME; name the account that jobs are charged to")
        if file.container is None and file.python is None:
            found.append("there is neither container nor python; ranks would run what PATH has")
    container, tunnel = file.container, file.tunnel
    if container is not None:
        if container.image == PLACEHOLDER:
            found.append("container.image is CHANGE_ME; see docs/containers.md")
        elif (
            container.image.startswith("/")
            and tunnel.kind == "local"
            and not Path(container.image).is_file()
        ):
            found.append(f"container.image {container.image} is not there")
        for mount in container.mounts:
            if ":" not in mount:
                found.append(f"container.mounts has {mount!r}; write HOST:CONTAINER")
    if tunnel.kind == "ssh":
        for name in ("host", "user", "folder"):
            if getattr(tunnel, name) is None:
                found.append(f"tunnel.{name} is missing; an SSH tunnel needs it")
        if tunnel.identity is not None and not Path(tunnel.identity).expanduser().is_file():
            found.append(f"tunnel.identity {tunnel.identity} is not there")
    return found
