# SPDX-License-Identifier: Apache-2.0
"""Run a function on several gloo ranks of this machine, joined by a file, with an end by force."""

import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import spawn

T = TypeVar("T")


def on_ranks(
    size: int, function: Callable[..., T], *args: Any, timeout_seconds: float
) -> dict[int, T]:
    """Return what `function(*args)` returns on each rank, the cores shared evenly between them.

    What the ranks print goes to standard error: the answer is the caller's to print. Raises
    TimeoutError, with the ranks ended, and what torch raises where a rank fails.
    """
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // size))
    queue = get_context("spawn").SimpleQueue()
    found: dict[int, T] = {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, folder, timeout_seconds, function, args, queue)
        ranks = spawn(_rank, arguments, nprocs=size, join=False)
        end = time.monotonic() + timeout_seconds
        ended = False
        while not ended:
            ended = ranks.join(timeout=0.2)
            while not queue.empty():  # a rank that answers at length waits until it is read
                rank, answer = queue.get()
                found[rank] = answer
            if time.monotonic() > end and not ended:
                for process in ranks.processes:
                    process.kill()
                raise TimeoutError(
                    f"{size} ranks had not ended in {timeout_seconds:,.0f} s; "
                    "take a shorter sequence, or a longer --timeout"
                )
    return found


def _rank(
    rank: int, size: int, folder: str, timeout_seconds: float, function: Callable[..., Any],
    args: tuple[Any, ...], queue: Any,
) -> None:  # fmt: skip
    os.dup2(2, 1)
    places = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    os.environ |= {name: str(value) for name, value in places.items()}  # DeepSpeed reads them
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    queue.put((rank, function(*args)))
    dist.barrier()  # none leaves while another still sends
    dist.destroy_process_group()
