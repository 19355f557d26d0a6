# SPDX-License-Identifier: Apache-2.0
"""Ranks on this machine, started by a command and joined through a file."""

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from data.cuda_extension import during_import, prepare_process
from longhaul.terminal.console import output_to
from slurm import starter

if TYPE_CHECKING:
    from slurm.experiment import Job

FIRST = "data.without_cuda_extension"
"""Module that a forkserver imports before all others."""


def run_on_ranks(
    rank: Callable[..., None],
    ranks: int,
    *args: Any,
    imported: Sequence[str] = (),
    log: Path | None = None,
) -> list[Any]:
    """Run `rank(rank, ranks, folder, *args, results)` in `ranks` processes; return what they put.

    The modules of `imported` are loaded once, in a server from which the processes are forked;
    without any, each process is spawned. Output goes to `log`, if given. A failing rank ends the
    command with its error in one line and exit code 1.
    """
    from torch.multiprocessing import get_context
    from torch.multiprocessing.spawn import ProcessException, start_processes

    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))  # of the ranks
    method = "forkserver" if imported else "spawn"
    context = get_context(method)
    if imported:
        context.set_forkserver_preload([FIRST, *imported])
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with output_to(log) if log else nullcontext(), during_import():
                arguments = (starter.value(), rank, ranks, folder, *args, results)
                start_processes(_prepared, arguments, nprocs=ranks, start_method=method)
        except ProcessException as error:  # a rank raised, or a signal ended it
            if os.environ.get("LONGHAUL_TRACEBACK"):
                raise
            why = str(error).strip().splitlines()[-1]
            typer.echo(f"error: rank {error.error_index} failed: {why}", err=True)
            raise typer.Exit(1) from None
    found = []
    while not results.empty():
        found.append(results.get())
    return found


def _prepared(number: int, started_by: str, rank: Callable[..., None], *args: Any) -> None:
    """Run a rank that imports Megatron-Core, and ends with the command."""
    starter.end_with_starter(started_by)
    prepare_process()
    rank(number, *args)


IMPORTED = (
    "recipes.pretrain",
    "recipes.checkpoints.weight_checksums",
    "eval.evaluate",
    "nemo_run",
    "longhaul.cli",
)


def preload(log: Path) -> None:
    """Start the imports in the process that ranks are forked from; its output goes to `log`."""
    from multiprocessing import forkserver, get_context

    get_context("forkserver").set_forkserver_preload([FIRST, *IMPORTED])
    with output_to(log):
        forkserver.ensure_running()


def run_forked(jobs: "Sequence[Job]", log: Path) -> None:
    """Run the jobs in order; end the command at the first that fails.

    The output of the ranks goes to `log`.
    """
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

    for job in jobs:
        ranks = int(job.executor.ntasks_per_node)
        task = ZlibJSONSerializer().serialize(job.task)
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        variables = {**job.executor.env_vars, **_torchrun(ranks, store.port)}
        try:
            run_on_ranks(_rank, ranks, task, variables, str(log), imported=IMPORTED, log=log)
        except typer.Exit:
            typer.echo(f"{job.name} failed; the output of its ranks is in {log}", err=True)
            raise
        del store  # alive until here, as torchrun's agent is


def _torchrun(ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for every rank of one node."""
    return {
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "forked",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _rank(
    rank: int,
    ranks: int,
    folder: str,
    task: str,
    variables: dict[str, str],
    log: str,
    results: Any,
) -> None:
    """Run the task on this rank, as nemo-run's runner does."""
    with open(log, "a") as file:  # the server itself writes to the log of its first job
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import warnings

    import fiddle as fdl
    import nemo_run
    import torch
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    warnings.simplefilter("ignore")
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    fdl.build(fdl.cast(nemo_run.Partial, ZlibJSONSerializer().deserialize(task)))()
