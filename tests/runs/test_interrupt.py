# SPDX-License-Identifier: Apache-2.0
"""Ranks end with the command, also one that is killed, when they have saved."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longhaul.run_folder.lock import require_unused
from recipes.checkpoints.marker import steps_taken
from tests.conditions import until

pytestmark = pytest.mark.slow

LONGHAUL = Path(sys.executable).parent / "longhaul"
KILLS = [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)]
"""The second is shown of what starts ranks by `tests/slurm/test_starter.py`."""


@pytest.mark.parametrize("how", KILLS, ids=["interrupt", "kill"])
def test_an_interrupted_stage_saves_and_leaves_no_rank_running(tmp_path, small_store, how):
    command = [LONGHAUL, "pretrain", "--factory", "tiny_512", f"data.store={small_store}"]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    stage = tmp_path / "runs" / "tiny" / "stages" / "tiny_512"
    metrics = stage / "metrics.jsonl"
    deadline = time.monotonic() + 400
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert _ranks(tmp_path)
    os.kill(process.pid, how)
    assert process.wait(timeout=150) != 0
    if how == signal.SIGKILL:
        until(lambda: not _ranks(tmp_path))
    assert not _ranks(tmp_path)
    assert steps_taken(stage / "checkpoints") > 0
    require_unused(stage)


def _ranks(folder: Path) -> list[str]:
    """Return the processes that run in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").resolve() == folder and b"local_rank.py" in (
                    entry / "cmdline"
                ).read_bytes():
                    found.append(entry.name)
            except OSError:
                continue
    return found
