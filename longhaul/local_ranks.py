# SPDX-License-Identifier: Apache-2.0
"""Ranks of this machine, started by a command and joined by a file."""

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer

from data.cuda_extension import architecture_named
from longhaul.terminal.console import output_to


def results_of(
    rank: Callable[..., None],
    ranks: int,
    *args: Any,
    imported: Sequence[str] = (),
    log: Path | None = None,
) -> list[Any]:
    """Run `rank(rank, ranks, folder, *args, results)` as so many processes; return what they put.

    The modules of `imported` are loaded once, in a server from which the processes are forked;
    without any, each begins anew. What they print goes to `log`, if given. A rank that fails ends
    the command: its error in one line, exit code 1.
    """
    from torch.multiprocessing import get_context
    from torch.multiprocessing.spawn import ProcessException, start_processes

    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))  # of the ranks
    method = "forkserver" if imported else "spawn"
    context = get_context(method)
    if imported:
        context.set_forkserver_preload(list(imported))
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with output_to(log) if log else nullcontext(), architecture_named():
                start_processes(
                    rank, (ranks, folder, *args, results), nprocs=ranks, start_method=method
                )
        except ProcessException as error:  # one raised, or was ended by a signal
            if os.environ.get("LONGHAUL_TRACEBACK"):
                raise
            why = str(error).strip().splitlines()[-1]
            typer.echo(f"error: rank {error.error_index} failed: {why}", err=True)
            raise typer.Exit(1) from None
    found = []
    while not results.empty():
        found.append(results.get())
    return found
