# SPDX-License-Identifier: Apache-2.0
"""Links are measured in a process of its own, which leaves the rank's first group to training."""

import os
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from slurm.preflight.machine import Machine, Rank, rank_of
from slurm.preflight.ranks import measurement
from slurm.preflight.ranks.rendezvous import Meeting, meet
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
        hasty = replace(meeting, seconds=10.0) if program_of_rank_1 else meeting
        measurement.measure_apart(hasty, ["n0", "n0"], 0.2, SMALL, on_gpus=False)
        rows = meeting.gathered(measurement.TIMES)
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
    assert measurement.WAITED in rows[0]


@pytest.mark.parametrize(
    ("on_gpus", "made_before", "apart"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_only_ranks_on_gpus_without_a_group_measure_in_another_process(
    monkeypatch, on_gpus, made_before, apart
):
    rank = Rank(
        rank=0, world_size=1, local_rank=0, host="n0", address="localhost", port=1, agent=False
    )
    meeting = Meeting(rank, dist.HashStore(), 1.0)
    asked = []
    for name in ("measure_apart", "_times"):
        monkeypatch.setattr(measurement, name, lambda *_, name=name, **__: asked.append(name))
    monkeypatch.setattr(measurement.dist, "is_initialized", lambda: made_before)
    meeting.say(measurement.TIMES, {})
    measurement.measured(meeting, ["n0"], 0.2, SMALL, on_gpus=on_gpus)
    assert asked == ["measure_apart" if apart else "_times"]


def test_a_process_that_measures_does_not_debug_communication(monkeypatch):
    debugged = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "x.log", "NCCL_DEBUG_SUBSYS": "COLL"}
    for name, value in {**debugged, "NCCL_IB_HCA": "mlx5"}.items():
        monkeypatch.setenv(name, value)
    found = measurement._environment()
    assert not debugged.keys() & found.keys()
    assert (found["NCCL_IB_HCA"], found["TORCH_DISTRIBUTED_DEBUG"]) == ("mlx5", "OFF")


@pytest.mark.parametrize(
    ("code", "said"), [(28, "did not answer"), (-6, "did not answer"), (-9, "SIGKILL"), (3, "3")]
)
def test_how_a_process_without_times_ended_is_said(code, said):
    assert said in measurement._ending(code)
