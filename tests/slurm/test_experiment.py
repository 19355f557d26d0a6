# SPDX-License-Identifier: Apache-2.0
import os
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import nemo_run as run
import pytest

from longhaul.terminal.messages import resumable
from slurm import experiment
from slurm.local_executor import local_executor


class HalfAChain:
    """An experiment of three jobs, the third of which the scheduler refuses."""

    def __init__(self) -> None:
        self._runner = object()
        self.cancelled: list[str] = []
        self.jobs = [
            SimpleNamespace(id=name, cancel=lambda _, name=name: self.cancelled.append(name))
            for name in ("prepare", "stage", "evaluate")
        ]

    def run(self, **_: bool) -> None:
        raise RuntimeError("QOSMaxSubmitJobPerUserLimit")


def test_the_half_of_a_chain_that_was_handed_over_is_cancelled(monkeypatch, tmp_path):
    chain = HalfAChain()
    monkeypatch.setattr(experiment, "scripts", lambda *_: {})
    monkeypatch.setattr(experiment, "_chain", lambda *_: nullcontext(chain))
    with pytest.raises(RuntimeError, match="QOSMaxSubmitJobPerUserLimit"):
        experiment.submit("ladder", [], tmp_path)
    assert chain.cancelled == ["prepare", "stage", "evaluate"]


AGENT = "E1122 13:51 23742 torch/distributed/elastic/multiprocessing/api.py:1002]"
OF_TORCHRUN = """\
Traceback (most recent call last):
  File "/venv/bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n\
============================================================
a_long_path/fdl_runner.py FAILED
"""


@pytest.mark.parametrize(
    ("wrote", "code", "said"),
    [
        ("starting\nthe disk of n3 is gone\n", 1,
         "rank 1 ended with exit code 1; it wrote last: starting / the disk of n3 is gone"),
        ("", 3, "rank 1 ended with exit code 3"),
        ("step 7\n", -9, "rank 1 was ended by SIGKILL, which the kernel sends when memory runs "
         "out; it wrote last: step 7"),
        ("step 7\nOneLogger: Setting error_handling_strategy to DISABLE for rank (rank=1)\n"
         "No exporters were provided. This means that no telemetry data will be collected.\n"
         "WARNING: transformer_engine not installed. Using default recipe.\n", -9,
         "rank 1 was ended by SIGKILL, which the kernel sends when memory runs out; it wrote "
         "last: step 7"),
        ("step 7\n", -11, "rank 1 was ended by SIGSEGV; it wrote last: step 7"),
        ("Traceback (most recent call last):\nAssertionError\n", 1, "AssertionError"),
        ("Traceback (most recent call last):\nOSError: no room\n", 1, "OSError: no room"),
        ("Traceback (most recent call last):\n"
         "torch.distributed.checkpoint.api.CheckpointException: CheckpointException "
         "ranks:dict_keys([0])\nTraceback (most recent call last): (RANK 0)\n"
         "KeyError: 'decoder.layers'\n", 1, "KeyError: 'decoder.layers'"),
        ("Traceback (most recent call last):\nCheckpointException: CheckpointException "
         "ranks:dict_keys([0])\nzipfile.BadZipFile: bad magic\n", 1,
         "CheckpointException: CheckpointException ranks:dict_keys([0])"),
    ],
    ids=["words", "nothing", "killed", "notices", "crashed", "bare", "exception", "checkpoint",
         "nothing else"],
)  # fmt: skip
def test_a_job_that_failed_says_what_its_rank_wrote_last(tmp_path, wrote, code, said):
    log = tmp_path / "stage" / "combined.log"
    log.parent.mkdir()
    lines = "".join(f"[default1]:{line}\n" for line in wrote.splitlines())
    ended = f"{AGENT} failed (exitcode: {code}) local_rank: 1 (pid: 7) of binary: python\n"
    alone = "[default0]:RuntimeError: Connection closed by peer\n" if code < 0 else ""
    log.write_text(f"[default0]:starting\n{lines}{alone}[default0]:waiting\n{ended}{OF_TORCHRUN}")
    told = str(experiment.JobFailedError("stage", "FAILED", tmp_path))
    assert told == f"stage ended as failed: {said}; the output of its ranks is in {log}"


def test_a_stop_that_was_asked_for_is_told_without_a_cause_to_fix(tmp_path, monkeypatch, capsys):
    said = "stage saved at step 3 of 9 and stopped, as run/stop asked"
    (tmp_path / "combined.log").write_text("[default0]:starting\n")
    monkeypatch.setattr("sys.argv", ["longhaul", "run", "--ladder", "tiny"])
    with pytest.raises(experiment.JobFailedError, match=f"^{said}$"), resumable():
        raise experiment.JobFailedError("stage", "stopped", tmp_path, said)
    assert capsys.readouterr().err.startswith("the same command resumes: ")
    with pytest.raises(experiment.JobFailedError), resumable():
        raise experiment.JobFailedError("stage", "failed", tmp_path, "no room")
    assert capsys.readouterr().err.startswith("once the cause is fixed, the same command resumes")
    with pytest.raises(experiment.JobFailedError), resumable(saves=[tmp_path]):  # none is there
        raise experiment.JobFailedError("stage", "failed", tmp_path, "no room")
    assert "fixed, the same command starts again: " in capsys.readouterr().err


def test_ranks_start_in_any_folder_and_import_nothing_of_it(tmp_path, monkeypatch):
    folder = tmp_path / "Jürgen's ${app_id} books"
    folder.mkdir()
    (folder / "data.py").write_text("raise SystemExit('a file of the user was imported')")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # torchrun
    executor = local_executor(1)
    executor.env_vars["PYTHONSAFEPATH"] = ""  # Python 3.10 does not know it
    task = run.Partial(import_module, "data.store")
    experiment.run_in_order("books", [experiment.Job("imports", task, executor)], folder / "launch")
