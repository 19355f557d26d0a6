# SPDX-License-Identifier: Apache-2.0
"""`longhaul preflight`: what would stop or slow a job on this machine, before it starts."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slurm.preflight.expected import Expected


def preflight(
    cluster: Annotated[
        str, typer.Option(help="Cluster file to hold the machine to: a shipped name or a path.")
    ] = "",
    nodes: Annotated[
        int, typer.Option(min=0, help="Nodes of the job.", show_default="those the layout fills")
    ] = 0,
    layout: Annotated[
        str, typer.Option(help="The job's layout in words, as 'tp2 ulysses4 dp2'.")
    ] = "",
    run: Annotated[Path | None, typer.Option(help="Run folder: written to, by every node.")] = None,
    store: Annotated[Path | None, typer.Option(help="Token store: read by every node.")] = None,
    seconds: Annotated[
        float, typer.Option(min=0, help="What measuring links may take; 0: not at all.")
    ] = 30.0,
    as_text: Annotated[bool, typer.Option("--json", help="Print the page for programs.")] = False,
) -> None:
    """Check GPUs, links, host, folders, versions and clocks, and of ranks of a job the links.

    Under torchrun or srun every rank takes part and rank 0 prints the page. The exit code is 0
    where nothing failed, else that of the first group that did: 20 ranks, 21 GPUs, 22 topology, 23
    versions, 24 host, 25 files, 26 network, 27 clocks, 28 speed.
    """
    from slurm.preflight.check import as_json, exit_code, page
    from slurm.preflight.job import all_checks
    from slurm.preflight.machine import Machine

    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's import, on every rank
    expected = replace(_expected(cluster, nodes, layout), run_folder=run, store=store)
    checks, shown = all_checks(expected, Machine(), seconds=seconds)
    if shown:
        typer.echo(as_json(checks) if as_text else "\n".join(page(checks)))
    raise typer.Exit(exit_code(checks))


def _expected(cluster: str, nodes: int, words: str) -> "Expected":
    """Return what the job needs by its cluster and layout.

    Raises ValueError for a layout or a number of nodes without the machine that they are for.
    """
    from recipes import cluster as clusters
    from recipes.layout_words import layout_from
    from slurm.preflight.expected import Expected

    if cluster:
        layout = layout_from(words) if words else None
        return Expected.of(clusters.load(cluster), layout, nodes=nodes)
    if words:
        raise ValueError("--layout needs --cluster, which says how many GPUs a node has")
    return Expected(nodes=nodes)
