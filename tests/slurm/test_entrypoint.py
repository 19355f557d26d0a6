# SPDX-License-Identifier: Apache-2.0
"""A rank that srun started: its place, and what it hears of signals."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from custom_modules.checkpoints.index import CheckpointError
from slurm import entrypoint, outcome
from tests.ranks import TREE

SRUN = {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_NTASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2",
    "MASTER_ADDR": "n1", "MASTER_PORT": "29500",
}  # fmt: skip
PLACE = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "77.2",
}  # fmt: skip
RANK = """
import json, os, signal, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()  # as a library's
from slurm.entrypoint import join
join(blocked={blocked})
threads = [open(f"/proc/self/task/{{one}}/status").read() for one in os.listdir("/proc/self/task")]
masks = [int(text.split("SigBlk:")[1].split()[0], 16) for text in threads]
both = 1 << signal.SIGTERM - 1 | 1 << signal.SIGUSR1 - 1
place = [os.environ.get(name) for name in {place}]
print(json.dumps([os.getpid(), [mask & both == both for mask in masks], place]))
os._exit(0)
"""


@pytest.mark.parametrize("blocked", [True, False])
def test_no_thread_of_a_rank_in_training_hears_what_ends_it(blocked, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(blocked=blocked, place=[*PLACE]))
    started = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True,
        env={**_plain(), **SRUN, "PYTHONPATH": str(TREE)},
    )  # fmt: skip
    pid, heard, place = json.loads(started.communicate(timeout=300)[0])
    assert pid == started.pid
    assert len(heard) > 1
    assert set(heard) == {blocked}
    assert place == [*PLACE.values()]


def test_a_stage_whose_marker_is_damaged_says_so_before_it_trains(tmp_path, monkeypatch):
    from recipes.resolved import yaml_file

    marker = tmp_path / "checkpoints" / "step=8" / "longhaul.json"
    marker.parent.mkdir(parents=True)
    marker.write_text("{")
    recipe = SimpleNamespace(
        resume=SimpleNamespace(resume_from_directory=marker.parents[1]),
        trainer=SimpleNamespace(max_steps=20),
    )
    monkeypatch.setattr(yaml_file, "read", lambda path: recipe)
    monkeypatch.setattr(entrypoint, "prepare_process", lambda: None)
    monkeypatch.setenv(outcome.VARIABLE, str(tmp_path / "outcome"))
    with pytest.raises(CheckpointError, match="is damaged"):
        entrypoint.train("config.yaml")
    state, said = outcome.outcome(tmp_path / "outcome")
    assert state == "failed"
    assert said.startswith(f"{marker} is damaged")


def _plain() -> dict[str, str]:
    """Return this environment without what torchrun says."""
    return {name: value for name, value in os.environ.items() if name not in PLACE}
