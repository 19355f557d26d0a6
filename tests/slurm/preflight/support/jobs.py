# SPDX-License-Identifier: Apache-2.0
"""Ranks of a job that runs preflight: started as torchrun starts them, on nodes by name."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from slurm.preflight import run
from slurm.preflight.check import PreflightCheck, PreflightError
from slurm.preflight.ranks import clocks, timings
from slurm.preflight.ranks.timings import Sizes
from slurm.preflight.requirements import Expected
from slurm.preflight.run import Page
from tests.ranks import Ranks, Server

SERVER = Server("torch.distributed", "slurm.preflight.ranks.checks", "slurm.preflight.run")
SMALL = Sizes(message=2**16, pair=2**14, product=64)
NOISY = {"slow_warned": 20.0, "slow_failed": 30.0}
"""Ranks that share a few cores differ by what else runs there."""
SECONDS = 90


def run_job(
    expected: Expected, size: int, *, nodes: int = 1, fault: Callable[..., Any] | None = None,
    variables: dict[str, str] | None = None,
) -> list[list[PreflightCheck]]:  # fmt: skip
    """Return of each rank the checks that it had; `fault(rank)` is a context that plants one."""
    told = pages_of(expected, size, nodes=nodes, fault=fault, variables=variables)
    return [page.checks for page in told]


def pages_of(
    expected: Expected, size: int, *, nodes: int = 1, fault: Callable[..., Any] | None = None,
    variables: dict[str, str] | None = None,
) -> list[Page]:  # fmt: skip
    """Return of each rank the page that it had, or that its error had."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    told = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **(variables or {}),
    }
    with Ranks(_rank, size, expected, size // nodes, told, fault, server=SERVER) as ranks:
        return ranks.results(SECONDS)


def _rank(
    expected: Expected, ranks_per_node: int, told: dict[str, str], fault: Callable[..., Any] | None
) -> Page:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()  # a job has none yet
    told = {
        **told,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % ranks_per_node),
        "SLURMD_NODENAME": f"n{rank // ranks_per_node}",
    }
    with (
        mock.patch.dict(os.environ, told),
        mock.patch("slurm.preflight.ranks.checks.ON_CPU", SMALL),
        fault(rank) if fault else mock.patch.dict({}),
    ):
        page = page_of(expected)
        if not any(check.state == "failure" for check in page.checks):
            dist.init_process_group("gloo")  # as NeMo does afterwards, by the same variables
            ones = torch.ones(1)
            dist.all_reduce(ones)
            assert int(ones) == dist.get_world_size()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return page


def page_of(expected: Expected) -> Page:
    """Return the page of a preflight that returned, or the one it raised."""
    pages: list[Page] = []
    every = run.all_checks

    def kept(*args: Any, **named: Any) -> Page:
        pages.append(every(*args, **named))
        return pages[0]

    with mock.patch.object(run, "all_checks", kept):
        try:
            run.preflight(expected, seconds=1.0)
        except PreflightError as error:
            return Page(checks=error.checks, nodes=error.nodes, met=error.met)
    return pages[0]


class OutOfReach:
    """Rank 1 is told a port that nothing listens at."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __call__(self, rank: int) -> Any:
        return mock.patch.dict(os.environ, {"MASTER_PORT": str(self.port)} if rank == 1 else {})


SLOW_SECONDS = 0.5
"""Far longer than a healthy rank takes on a busy machine, which may not run it for some ten ms."""


def slow_link(rank: int) -> Any:
    """Rank 2 begins to send late."""
    real = timings.exchange

    def late(*args: Any) -> None:
        time.sleep(SLOW_SECONDS)
        real(*args)

    return mock.patch.object(timings, "exchange", late if rank == 2 else real)


def slow_compute(rank: int) -> Any:
    """Rank 2 takes its time for a product."""
    real = timings.product

    def slow(square: Any) -> Any:
        time.sleep(SLOW_SECONDS)
        return real(square)

    return mock.patch.object(timings, "product", slow if rank == 2 else real)


class _Shifted:
    """The module `time`, with a clock that is ahead."""

    perf_counter = staticmethod(time.perf_counter)

    @staticmethod
    def time() -> float:
        return time.time() + 7


def clock_ahead(rank: int) -> Any:
    """The clock of rank 1's node is seven seconds ahead."""
    return mock.patch.object(clocks, "time", _Shifted if rank == 1 else time)


def loose(expected: Expected) -> Expected:
    """Return the same with limits that ranks on shared cores keep."""
    return replace(expected, **NOISY)
