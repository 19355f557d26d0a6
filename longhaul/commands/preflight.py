# SPDX-License-Identifier: Apache-2.0
"""`longhaul preflight`: find what would stop or slow a job on this machine, before it starts."""

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longhaul.options import Json

if TYPE_CHECKING:
    from slurm.cluster_file import ClusterFile
    from slurm.preflight.requirements import Expected


def preflight(
    cluster: Annotated[
        str,
        typer.Option(help="Cluster file to check the machine against: a shipped name or a path."),
    ] = "",
    nodes: Annotated[
        int, typer.Option(min=0, help="Nodes of the job.", show_default="those the layout fills")
    ] = 0,
    layout: Annotated[
        str, typer.Option(help="The job's layout in words, such as 'tp2 ulysses4 dp2'.")
    ] = "",
    run: Annotated[Path | None, typer.Option(help="Run folder: every node writes to it.")] = None,
    store: Annotated[Path | None, typer.Option(help="Token store: every node reads it.")] = None,
    seconds: Annotated[
        float, typer.Option(min=0, help="Time for measuring links; 0: do not measure.")
    ] = 30.0,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not read the whole store.")
    ] = False,
    as_text: Json = False,
) -> None:
    """Check GPUs, links, host, folders, versions, clocks and, in a job, links between ranks.

    Variables of the cluster file's environment are set as in a job, except those already set.
    Under torchrun or srun every rank takes part and rank 0 prints the page. The exit code is 0
    if nothing failed, else that of the first group that did: 20 ranks, 21 GPUs, 22 topology, 23
    versions, 24 host, 25 files, 26 network, 27 clocks, 28 speed.
    """
    from slurm.cluster_file import load
    from slurm.preflight.check import as_json, exit_code, page
    from slurm.preflight.machine import Machine
    from slurm.preflight.run import all_checks

    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's import, on every rank
    file = load(cluster) if cluster else None
    expected = replace(
        _expected(file, nodes, layout),
        run_folder=run,
        store=store,
        verify="none" if no_verify else "whole",
    )
    for name, value in file.environment.items() if file is not None else ():
        os.environ.setdefault(name, str(value))
    found = all_checks(expected, Machine(), seconds=seconds)
    if found.shown:
        typer.echo(as_json(found.checks) if as_text else "\n".join(page(found.checks)))
    raise typer.Exit(exit_code(found.checks))


def _expected(file: "ClusterFile | None", nodes: int, words: str) -> "Expected":
    """Return the job's requirements according to its cluster and layout.

    Raises ValueError for a layout or a number of nodes without the machine that they are for.
    """
    from recipes.notation.layout import layout_from
    from slurm.preflight.requirements import Expected, thresholds

    if words and file is None:
        raise ValueError("--layout needs --cluster, which says how many GPUs a node has; name one")
    layout = layout_from(words) if words else None
    if file is None or (layout is None and file.hardware is None):
        machine = Expected(nodes=nodes)
    else:
        machine = Expected.of(file.machines, layout, nodes=nodes)
    return machine if file is None else replace(machine, **thresholds(file))
