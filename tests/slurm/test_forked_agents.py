# SPDX-License-Identifier: Apache-2.0
"""Agents and ranks that are forked from one program are what torchrun would have started."""

import atexit
import json
import os
import signal
import sys
import time
from pathlib import Path

import nemo_run
import numpy as np
import pytest
import torch

from slurm.experiment import Job, JobFailedError, run_in_order
from slurm.local_executor import local_executor


def says(folder: str) -> None:
    """Write what this rank finds, at its end."""
    rank = os.environ["RANK"]
    found = {
        "program": os.getpgid(os.getppid()) == os.getppid() and _parent(os.getppid()),
        "imported": "recipes.pretrain" in sys.modules,
        "random": float(np.random.rand()),
        "threads": torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"]),
        "handlers": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "folder": os.getcwd(),
        "variable": os.environ.get("MINE"),
    }
    atexit.register((Path(folder) / rank).write_text, json.dumps(found))


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def fails(how: str) -> None:
    """End rank 1 in some way; rank 0 waits."""
    if os.environ["RANK"] == "0":
        time.sleep(600)
    sys.stdout.write("step 7\n")
    if how == "raises":
        raise OSError("no room")
    if how == "exits":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_of_all_jobs_come_from_one_program_and_are_as_new(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [tmp_path / name for name in ("first", "second")]
    jobs = []
    for folder in folders:
        folder.mkdir()
        executor = local_executor(2)
        executor.env_vars["MINE"] = folder.name
        jobs.append(Job(folder.name, nemo_run.Partial(says, folder=str(folder)), executor))
    run_in_order("jobs", jobs, tmp_path / "launch")
    found = [json.loads((folder / rank).read_text()) for folder in folders for rank in "01"]
    (program,) = {one["program"] for one in found}
    assert program
    assert program != os.getpid()
    assert all(one["imported"] and one["threads"] and one["handlers"] for one in found)
    assert len({one["random"] for one in found}) == len(found)
    assert {one["folder"] for one in found} == {str(tmp_path)}
    assert [one["variable"] for one in found] == ["first", "first", "second", "second"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "OSError: no room"),
        ("exits", "rank 1 ended with exit code 3; it wrote last: step 7"),
        ("dies", "rank 1 was ended by SIGKILL, which the kernel sends when memory runs out; it "),
    ],
)
def test_a_job_that_failed_says_why(tmp_path, how, said):
    job = Job("job", nemo_run.Partial(fails, how=how), local_executor(2))
    with pytest.raises(JobFailedError, match=f"^job ended as failed: {said}"):
        run_in_order("jobs", [job], tmp_path / "launch")


def test_a_program_that_cannot_import_says_so(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text("raise ImportError('there is no NeMo')")
    monkeypatch.setattr("slurm.forked_agents.PROGRAM", program)
    job = Job("job", nemo_run.Partial(fails, how="exits"), local_executor(2))
    with pytest.raises(JobFailedError, match="ImportError: there is no NeMo"):
        run_in_order("jobs", [job], tmp_path / "launch")
