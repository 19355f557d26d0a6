# SPDX-License-Identifier: Apache-2.0
"""One process at a time writes into a run folder; the second is told who the first is."""

import json
import os
import subprocess
import sys

import pytest

from longhaul.run_lock import FILE, OF_RANKS, InUseError, in_use, require_unused

HOLDS = """
import sys
from pathlib import Path
from longhaul.run_lock import in_use
sys.argv[1:] = ["run", "--ladder", "a ladder"]
with in_use(Path({folder!r})):
    print("held", flush=True)
    sys.stdin.read()
"""
RANK = """
import fcntl, sys
file = open({file!r}, "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write('{{"host": "n7", "process": 41, "command": "rank 0", "since": "noon"}}')
file.flush()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Return a function that starts a process which holds a lock until the test ends."""
    started = []

    def start(code: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_process_is_refused_with_the_host_process_and_command_of_the_first(
    tmp_path, holder
):
    run = tmp_path / "run"
    first = holder(HOLDS.format(folder=str(run)))
    for refused in (lambda: require_unused(run), lambda: in_use(run).__enter__()):
        with pytest.raises(InUseError) as told:
            refused()
        said = str(told.value)
        assert f"{run} is in use by process {first.pid} on {os.uname().nodename} " in said
        assert "(longhaul run --ladder 'a ladder', since " in said
    first.communicate()
    assert not run.exists()


def test_the_lock_of_a_process_that_was_killed_is_taken_over(tmp_path, holder):
    first = holder(HOLDS.format(folder=str(tmp_path)))
    first.kill()
    first.communicate()
    assert json.loads((tmp_path / FILE).read_text())["process"] == first.pid
    require_unused(tmp_path)
    with in_use(tmp_path):
        assert json.loads((tmp_path / FILE).read_text())["process"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_still_train_into_a_folder_are_named(tmp_path, holder):
    rank = holder(RANK.format(file=str(tmp_path / OF_RANKS)))
    with pytest.raises(InUseError, match=r"in use by process 41 on n7 \(rank 0, since noon\)"):
        in_use(tmp_path).__enter__()
    rank.communicate()
    with in_use(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [OF_RANKS]


def test_what_was_written_meanwhile_stays(tmp_path):
    with in_use(tmp_path / "run"):
        (tmp_path / "run" / "result").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["result"]


def test_a_folder_of_another_is_locked_apart(tmp_path):
    with in_use(tmp_path / "run"), in_use(tmp_path / "run" / "stages" / "tiny_512"):
        require_unused(tmp_path / "run" / "stages" / "tiny_2k")
