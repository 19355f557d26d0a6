# SPDX-License-Identifier: Apache-2.0
"""This machine as a place to run: nemo-run's local executor with torchrun."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import nemo_run as run
import psutil

from recipes.planner import limits

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
OF_EVERY_RANK = {
    "HF_HUB_OFFLINE": "1",  # a run reads the tokenizer of its store, never the hub
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",  # NeMo's and Megatron's imports print pages of them
}
"""Variables of ranks wherever they run."""


def local_executor(ranks: int) -> run.LocalExecutor:
    """Return an executor of `ranks` processes on this machine, its cores shared out among them."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    said = os.environ.get(ALLOCATOR, "")
    return run.LocalExecutor(
        ntasks_per_node=ranks,
        launcher="torchrun",
        env_vars={
            "OMP_NUM_THREADS": str(threads),
            ALLOCATOR: allocator_settings(said),
            **OF_EVERY_RANK,
        },
    )


def allocator_settings(said: str) -> str:
    """Return torch's settings of its CUDA allocator: the user's own, and expandable segments.

    A segment that grows serves tensors of any size; fixed ones are left with holes, which at long
    sequences, whose tensors are gigabytes, cost memory that nothing can use.
    """
    if "expandable_segments:" in said:
        return said
    return ",".join(filter(None, (said, limits.ALLOCATOR)))


def stop_ranks(tell: Callable[[str], Any]) -> None:
    """Ask the ranks that this process started to stop, and wait until they have.

    A rank in training saves at the end of its step. The agents between do not wait for that, and
    one that is killed leaves its ranks behind: so they are told of nothing until the ranks ended.
    Another SIGINT meanwhile kills the ranks and all that they started.
    """
    below = psutil.Process().children(recursive=True)
    ranks = {process.pid: process for process in below if _is_rank(process)}
    first = [process for process in ranks.values() if _parent(process) not in ranks]

    def kill(*_: Any) -> None:
        for process in below:
            if process.pid in ranks:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    before = signal.signal(signal.SIGINT, kill)
    try:
        if first:
            tell("stopping; ranks in training save first, Ctrl-C again ends them now")
        for process in first:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        psutil.wait_procs(first)
    finally:
        signal.signal(signal.SIGINT, before)
    kill()


def _parent(process: psutil.Process) -> int | None:
    with suppress(psutil.Error):  # it has ended meanwhile
        return int(process.ppid())
    return None


def _is_rank(process: psutil.Process) -> bool:
    """Whether torchrun started a process, or one that did."""
    with suppress(psutil.Error):
        return "LOCAL_RANK" in process.environ()
    return False
