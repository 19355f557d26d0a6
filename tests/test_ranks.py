# SPDX-License-Identifier: Apache-2.0
"""What `run_ranks` hands back, and how it fails."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.conditions import until
from tests.ranks import Ranks, run_ranks


def sum_of_ranks(offset: int) -> tuple[int, int]:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def rank_1_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("odd length")
    dist.barrier()


def rank_1_is_killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def rank_0_never_ends() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)


def rank_starts_a_process(told: Path) -> None:
    child = subprocess.Popen(["sleep", "600"])
    told.with_suffix(".part").write_text(str(child.pid))
    told.with_suffix(".part").rename(told)
    child.wait()


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes() != b""  # it has ended, none waited
    except OSError:
        return False


def test_results_come_in_rank_order():
    assert run_ranks(sum_of_ranks, 2, 10) == [(0, 21), (1, 21)]


def test_the_rank_that_failed_is_named_with_its_error():
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2 failed.*ValueError: odd length"):
        run_ranks(rank_1_fails, 2)


def test_the_rank_that_was_killed_is_named():
    with pytest.raises(RuntimeError, match="rank 1 of 2 died with exit code -9"):
        run_ranks(rank_1_is_killed, 2)


def test_a_rank_that_hangs_is_named():
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 2"):
        run_ranks(rank_0_never_ends, 2, timeout_seconds=15)


def test_what_a_rank_has_started_ends_with_it(tmp_path):
    with Ranks(rank_starts_a_process, 1, tmp_path / "child") as ranks:
        place = tmp_path / "child"
        child = int(until(lambda: place.read_text() if place.exists() else not ranks.running()))
        assert is_alive(child)
    until(lambda: not is_alive(child))
