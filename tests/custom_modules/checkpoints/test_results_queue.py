# SPDX-License-Identifier: Apache-2.0
"""The process that collects the results of Megatron's checkpoint writer ends with its rank."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from custom_modules.checkpoints.results_queue import end_results_queue_with_rank
from tests.conditions import until
from tests.ranks import Ranks


def save_and_be_killed(folder: str) -> None:
    """Use the queue as a save does, and end as a rank does when memory runs out."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    end_results_queue_with_rank()
    named = "get_write_results_queue"  # from Megatron-Core 0.17 on without an underscore
    results = getattr(filesystem_async, named, getattr(filesystem_async, f"_{named}", None))()
    results.put("written")
    assert results.get() == "written"
    for child in psutil.Process().children():
        (Path(folder) / str(child.pid)).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_of_a_rank_that_is_killed_after_a_save(tmp_path):
    with (
        Ranks(save_and_be_killed, 1, str(tmp_path)) as ranks,
        pytest.raises(RuntimeError, match="died with exit code -9"),
    ):
        ranks.results(60)
    (server,) = [int(path.name) for path in tmp_path.iterdir()]
    until(lambda: not psutil.pid_exists(server), timeout_seconds=60)
