# SPDX-License-Identifier: Apache-2.0
"""Find and end processes by what is in their environment, and after the death of their owner too.

Slurm's steps leave the process group and the parent of whoever started them, so neither finds
them; the variables that they were started with stay.

`python -m tests.slurm.support.processes FOLDER NAME=VALUE` waits for the end of its standard input,
then kills the processes that carry the variable and removes the folder: a caller that dies, by
whatever signal, leaves nothing behind.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path


def carrying(*variables: str) -> set[int]:
    """Return the processes started with every `NAME=value` in their environment, and theirs."""
    found, parents = set(), {}
    wanted = {variable.encode() for variable in variables}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            # The name of the program, in brackets, may hold spaces and brackets.
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it ended meanwhile
        pid = int(entry.name)
        parents[pid] = parent
        if wanted.issubset(environment):
            found.add(pid)
    size = -1
    while size != len(found):
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return {pid for pid in found - {os.getpid()} if running(pid)}


def running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(*variables: str, timeout_seconds: float = 20) -> None:
    """Kill the processes that carry the variables, those begun meanwhile included."""
    end = time.monotonic() + timeout_seconds
    while left := carrying(*variables):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > end:
            raise TimeoutError(f"processes {sorted(left)} outlive SIGKILL")
        time.sleep(0.05)


def after_the_caller(folder: str, variable: str) -> None:
    """Wait until standard input ends; then kill and remove what the caller has left."""
    sys.stdin.buffer.read()
    kill(variable)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    after_the_caller(*sys.argv[1:])
