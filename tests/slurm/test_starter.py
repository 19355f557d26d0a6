# SPDX-License-Identifier: Apache-2.0
"""Ranks end with the command that started them, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slurm import starter
from slurm.starter import process_of
from tests import warm_start
from tests.conditions import until
from tests.ranks import TREE

RANK = """
import os, signal, subprocess, sys, time
from slurm import starter
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
signal.signal(signal.SIGTERM, {told})
starter.end_with_starter()
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
COMMAND = """
import os, subprocess, sys, time
from slurm import starter
rank = [sys.executable, "-c", os.environ["RANK"]]
subprocess.Popen(rank, env=dict(os.environ) | starter.variables({seconds}))
time.sleep(600)
"""
JOB = """
import sys
from pathlib import Path
import nemo_run
from slurm.experiment import Job, run_in_order
from slurm.local_executor import local_executor
from tests.slurm.test_starter import waits
job = Job("waits", nemo_run.Partial(waits, folder=sys.argv[1]), local_executor(2))
run_in_order("waits", [job], Path(sys.argv[1]) / "launch")
"""


def waits(folder: str) -> None:
    Path(folder, "ranks").mkdir(exist_ok=True)
    Path(folder, "ranks", str(os.getpid())).touch()
    time.sleep(600)


def ended(number: int) -> bool:
    try:
        return psutil.Process(number).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        ("signal.SIG_DFL", 600),
        ("lambda *_: (open('saved', 'w'), child.kill(), sys.exit())", 600),
        ("signal.SIG_IGN", 0.5),
    ],
    ids=["nothing_to_save", "saves", "deaf"],
)
def test_a_rank_and_its_children_end_after_the_command_was_killed(tmp_path, told, seconds):
    variables = {**os.environ, "RANK": RANK.format(told=told), "PYTHONPATH": str(TREE)}
    words = [sys.executable, "-c", COMMAND.format(seconds=seconds)]
    with subprocess.Popen(words, cwd=tmp_path, env=variables, stdout=subprocess.PIPE) as command:
        rank, child = map(int, command.stdout.readline().split())
        assert not ended(rank)
        command.kill()
    until(lambda: ended(rank) and ended(child), 60)
    assert (tmp_path / "saved").exists() == ("saved" in told)


def test_a_later_process_with_the_number_of_the_command_is_not_the_command():
    number, started, _ = starter.value().split(":")
    assert process_of(int(number), float(started)) is not None
    assert process_of(int(number), float(started) - 3600) is None


@pytest.mark.parametrize("killed", ["command", "agent"])
def test_ranks_of_torchrun_end_with_the_command_and_with_their_agent(tmp_path, killed):
    plain = warm_start.cold()
    words = [sys.executable, "-c", JOB, str(tmp_path)]
    command = subprocess.Popen(words, cwd=tmp_path, env=plain | {"PYTHONPATH": str(TREE)})
    try:
        ranks = [int(path.name) for path in until(lambda: two_ranks(tmp_path, command))]
        agent = psutil.Process(ranks[0]).ppid()
        os.kill(command.pid if killed == "command" else agent, signal.SIGKILL)
        until(lambda: all(ended(number) for number in (*ranks, agent)), 60)
        if killed == "agent":
            assert command.wait(timeout=60) == 1  # its job has failed
    finally:
        command.kill()
        command.wait()


def two_ranks(folder: Path, command: subprocess.Popen) -> list[Path]:
    """Return the files of two ranks; nothing while they are not all there."""
    assert command.poll() is None
    found = list((folder / "ranks").glob("*"))
    return found if len(found) == 2 else []
