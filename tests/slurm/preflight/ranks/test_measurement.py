# SPDX-License-Identifier: Apache-2.0
"""Links are measured in a process of its own, which leaves the rank's first group to training."""

import os
import sys
from unittest import mock

import torch.distributed as dist
from torch.distributed import TCPStore

from slurm.preflight.machine import Machine, rank_of
from slurm.preflight.ranks import measurement
from slurm.preflight.ranks.rendezvous import meet
from tests.ranks import Ranks
from tests.slurm.preflight.support.jobs import SECONDS, SERVER, SMALL


def measured_apart(program_of_rank_1: str = "") -> list[list[dict | str]]:
    """Return what each of two ranks had; rank 1's process may be another program."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with Ranks(_rank, 2, store.port, program_of_rank_1, server=SERVER) as ranks:
        return ranks.results(SECONDS)


def _rank(port: int, program_of_rank_1: str) -> list[dict | str]:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    told = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    python = program_of_rank_1 if rank == 1 and program_of_rank_1 else sys.executable
    seconds = 3.0 if program_of_rank_1 else measurement.BESIDE
    with (
        mock.patch.dict(os.environ, told),
        mock.patch.object(sys, "executable", python),
        mock.patch.object(measurement, "BESIDE", seconds),
    ):
        meeting = meet(rank_of(Machine()), SECONDS)
        rows = measurement.measured(meeting, ["n0", "n0"], 0.2, SMALL, on_gpus=False, apart=True)
        meeting.all("done", True)
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return rows


def test_rank_0_has_the_times_that_the_processes_of_all_ranks_wrote():
    rows, others = measured_apart()
    assert others == []
    assert [sorted(row["inside"]) for row in rows] == [["1"], ["0"]]
    assert all(row["product"] > 0 and row["collectives"]["all-reduce"] > 0 for row in rows)


def test_a_process_that_ends_without_times_is_reported_and_the_ranks_go_on(tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o755)
    rows, _ = measured_apart(str(program))
    assert rows[1] == "its measurement ended with exit code 7"
    assert isinstance(rows[0], str)
