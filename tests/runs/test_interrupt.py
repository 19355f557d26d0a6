# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends the ranks with the command, when they have saved."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.checkpoints.marker import steps_taken

pytestmark = pytest.mark.slow

LONGHAUL = Path(sys.executable).parent / "longhaul"


def test_an_interrupted_stage_saves_and_leaves_no_rank_running(tmp_path, small_store):
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
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=150) != 0
    assert not _ranks(tmp_path)
    assert steps_taken(stage / "checkpoints") > 0


def _ranks(folder: Path) -> list[str]:
    """Return the processes that run in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").resolve() == folder and b"fdl_runner" in (
                    entry / "cmdline"
                ).read_bytes():
                    found.append(entry.name)
            except OSError:
                continue
    return found
