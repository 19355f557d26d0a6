# SPDX-License-Identifier: Apache-2.0
"""`longhaul clusters`: list the cluster files, or check what one of them still lacks."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from longhaul.defaults import default
from longhaul.jobs.cluster_checks import lacking, with_names
from longhaul.options import Checking, Json, print_json, require_no_json
from recipes.spec import cluster
from recipes.spec.units import GiB
from slurm.cluster_file import ClusterFile, load

COLUMNS = ("name", "executor", "GPUs of a node", "host", "links, GB/s", "FP8")
app = typer.Typer(
    cls=Checking,
    help="List the cluster files, or check one.",
    invoke_without_command=True,
    no_args_is_help=False,
)


@app.callback()
def clusters(context: typer.Context, as_json: Json = False) -> None:
    """List the shipped cluster files."""
    if context.invoked_subcommand is not None:
        require_no_json(context, as_json)
        return
    names = ["local", *cluster.names()]
    if as_json:
        print_json([_content(load(name)) for name in names])
        return
    from rich.table import Table

    from longhaul.terminal.console import print_left_out, show

    lines = [dict(zip(COLUMNS, _cells(load(name)), strict=True)) for name in names]

    def table(without: Sequence[str]) -> Table:
        made = Table(box=None)
        titles = [title for title in COLUMNS if title not in without]
        for title in titles:
            made.add_column(title, no_wrap=True)
        for line in lines:
            made.add_row(*(line[title] for title in titles))
        return made

    left_out = show(table, ("links, GB/s", "executor", "host", "FP8", "GPUs of a node"))
    print_left_out(lines, "name", left_out)
    typer.echo(f"files: {cluster.FOLDER}; copy template.yaml for a cluster of your own")


def _content(file: ClusterFile) -> dict[str, Any]:
    """Return the table's row of a file in numbers."""
    found: dict[str, Any] = {"name": file.name, "executor": file.executor}
    if file.hardware is not None:
        machine = file.hardware
        found |= {
            "gpu": machine.gpu.name,
            "gpus_per_node": machine.gpus_per_node,
            "gpu_memory_bytes": machine.gpu_bytes,
            "host_memory_gib": machine.host_memory_gib,
            "nvlink_gigabytes_per_second": machine.nvlink_gbps,
            "network_gigabytes_per_second": machine.network_gbps,
            "fp8": bool(machine.gpu.fp8_tflops),
        }
    return found


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
    as_json: Json = False,
) -> None:
    """Read a cluster file and list what a launch would still lack; if anything, exit with 1.

    Account and partition may be set in longhaul.toml instead.
    """
    found = with_names(load(file), default("account"), default("partition"))
    lines = lacking(found)
    if as_json:
        print_json({**_content(found), "lacking": lines})
        raise typer.Exit(1 if lines else 0)
    typer.echo(f"{found.name}: {_sentence(found)}")
    for line in lines:
        typer.echo(f"FAIL  {line}")
    if lines:
        raise typer.Exit(1)
    typer.echo("ok    everything a launch needs is set")


def _sentence(file: ClusterFile) -> str:
    if file.hardware is None:
        return f"executor {file.executor}, no hardware to plan for"
    machine = file.hardware
    return (
        f"executor {file.executor}, {machine.gpus_per_node} x {machine.gpu.name} a node, "
        f"{machine.gpu_bytes / GiB:.1f} GiB each"
    )
