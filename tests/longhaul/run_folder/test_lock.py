# SPDX-License-Identifier: Apache-2.0
"""One process at a time writes into a run folder; the second is told who the first is."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longhaul.run_folder import lock
from longhaul.run_folder.lock import FILE, OF_RANKS, InUseError, in_use, require_unused

HOLDS = """
import sys
from pathlib import Path
from longhaul.run_folder.lock import in_use
sys.argv[1:] = ["run", "--ladder", "a ladder"]
with in_use(Path({folder!r})):
    print("held", flush=True)
    sys.stdin.read()
"""
WITHOUT_LOCKS = """
import errno, fcntl
def no_locks(*_):
    raise OSError(errno.ENOLCK, "no locks")
fcntl.flock = no_locks
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


def test_a_run_is_refused_where_it_would_evaluate_beside_another_command(holder, tmp_path, answer):
    first = holder(HOLDS.format(folder=str(tmp_path / "run" / "eval")))
    said = answer("run", "--ladder", "tiny", "--out", "run").error()
    assert f"run/eval is in use by process {first.pid} on " in said
    first.communicate()
    assert not (tmp_path / "run").exists()


def test_what_was_written_meanwhile_stays(tmp_path):
    with in_use(tmp_path / "run"):
        (tmp_path / "run" / "result").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["result"]


def test_a_folder_of_another_is_locked_apart(tmp_path):
    with in_use(tmp_path / "run"), in_use(tmp_path / "run" / "stages" / "tiny_512"):
        require_unused(tmp_path / "run" / "stages" / "tiny_2k")


@pytest.fixture
def without_locks(monkeypatch):
    """Have every file system refuse to lock, in this process."""
    monkeypatch.setattr(lock.fcntl, "flock", no_locks)


def no_locks(*_) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.usefixtures("without_locks")
def test_without_locks_the_process_that_made_the_file_holds_the_folder(tmp_path, holder):
    run = tmp_path / "run"
    first = holder(WITHOUT_LOCKS + HOLDS.format(folder=str(run)))
    for refused in (lambda: require_unused(run), lambda: in_use(run).__enter__()):
        with pytest.raises(InUseError, match=f"is in use by process {first.pid} "):
            refused()
    first.kill()
    first.communicate()
    require_unused(run)
    with in_use(run):
        assert json.loads((run / FILE).read_text())["process"] == os.getpid()
    assert list(run.iterdir()) == []


@pytest.mark.usefixtures("without_locks")
def test_without_locks_the_second_of_two_that_start_together_is_refused(
    tmp_path, holder, monkeypatch
):
    running = holder("print('held', flush=True); import sys; sys.stdin.read()")
    record = {"host": os.uname().nodename, "process": running.pid}
    (tmp_path / FILE).touch()  # as the first has just made it
    monkeypatch.setattr(
        lock.time, "sleep", lambda _: (tmp_path / FILE).write_text(json.dumps(record))
    )
    with pytest.raises(InUseError, match=f"is in use by process {running.pid} "):
        in_use(tmp_path).__enter__()


@pytest.mark.usefixtures("without_locks")
@pytest.mark.parametrize("record", ["", '{"host": "another", "process": 1}'])
def test_without_locks_a_record_of_no_process_of_this_machine_is_taken_over(tmp_path, record):
    (tmp_path / FILE).write_text(record)
    with in_use(tmp_path):
        assert json.loads((tmp_path / FILE).read_text())["process"] == os.getpid()


def test_folders_that_were_made_are_removed_where_the_lock_cannot_be(tmp_path, monkeypatch):
    def full(path: Path) -> None:
        assert path.parent.is_dir()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(lock, "_locked", full)
    with pytest.raises(OSError, match="No space"):
        in_use(tmp_path / "a" / "run").__enter__()
    assert list(tmp_path.iterdir()) == []
