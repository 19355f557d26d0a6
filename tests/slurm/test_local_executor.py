# SPDX-License-Identifier: Apache-2.0
"""This machine as a place to run."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from slurm.local_executor import OF_DEBUGGED_RANKS, local_executor, stop_ranks
from tests.conditions import until

RANK = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: {told})
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("said", "given"),
    [
        (None, "expandable_segments:True"),
        ("", "expandable_segments:True"),
        ("max_split_size_mb:512", "max_split_size_mb:512,expandable_segments:True"),
        ("expandable_segments:False", "expandable_segments:False"),
    ],
)
def test_ranks_allocate_in_segments_that_grow_unless_the_user_says_otherwise(
    said, given, monkeypatch
):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if said is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", said)
    assert local_executor(2).env_vars["PYTORCH_CUDA_ALLOC_CONF"] == given


def test_debugged_ranks_log_into_their_folder_unless_the_user_says_otherwise(monkeypatch, tmp_path):
    for name in OF_DEBUGGED_RANKS:
        monkeypatch.delenv(name, raising=False)
    assert not set(OF_DEBUGGED_RANKS) & set(local_executor(2).env_vars)
    found = local_executor(2, debugged=tmp_path / "a stage").env_vars
    assert found["NCCL_DEBUG"] == "INFO"
    assert found["NCCL_DEBUG_FILE"] == str(tmp_path / "a stage" / "nccl_%h_%p.log")
    assert found["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    monkeypatch.setenv("NCCL_DEBUG", "TRACE")  # nemo-run passes on what the shell has
    again = local_executor(2, debugged=tmp_path).env_vars
    assert "NCCL_DEBUG" not in again
    assert again["NCCL_DEBUG_SUBSYS"] == "INIT,ENV,NET,COLL"


@pytest.fixture
def rank():
    """Return a function that starts a process as torchrun does, and ends it at the end."""
    started = []

    def start(told: str) -> subprocess.Popen:
        words = [sys.executable, "-c", RANK.format(told=told)]
        variables = {**os.environ, "LOCAL_RANK": str(len(started))}
        started.append(subprocess.Popen(words, env=variables, stdout=subprocess.PIPE))
        started[-1].stdout.readline()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_ranks_are_waited_for_until_they_have_saved(rank, tmp_path):
    saved = tmp_path / "saved"
    saves = rank(f"(time.sleep(1), open({str(saved)!r}, 'w'), sys.exit())")
    ends = rank("sys.exit()")
    told: list[str] = []
    stop_ranks(told.append)
    assert saved.exists()
    assert not psutil.pid_exists(saves.pid)
    assert not psutil.pid_exists(ends.pid)
    assert len(told) == 1


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN])
def test_a_second_interrupt_ends_ranks_that_do_not_stop(rank, tmp_path, before):
    asked = tmp_path / "asked"
    deaf = rank(f"open({str(asked)!r}, 'w')")

    def interrupt_again() -> None:
        until(asked.exists)
        os.kill(os.getpid(), signal.SIGINT)

    again = threading.Thread(target=interrupt_again)
    here = signal.signal(signal.SIGINT, before)  # a shell ignores it for what runs in background
    try:
        stop_ranks(lambda _: again.start())  # would wait for ten minutes
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, here)
    again.join()
    assert not psutil.pid_exists(deaf.pid)


def test_processes_that_are_no_ranks_are_left_alone():
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    stop_ranks(lambda _: None)
    assert other.poll() is None
    other.kill()
    other.wait()


def test_an_environment_without_torchrun_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"torchrun, which starts ranks, is neither in .* nor on PATH"
    ):
        local_executor(2)
