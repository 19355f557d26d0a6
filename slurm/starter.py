# SPDX-License-Identifier: Apache-2.0
"""End the ranks of this machine when the command that started them has ended; light.

A command that is killed with SIGKILL cannot stop its ranks, and its torchrun agent runs on. So each
rank watches the command, and its own parent (the agent), from a thread. When either has ended, the
rank sends itself SIGTERM: a rank in training saves at the end of its step and stops, and any other
ends at once. A rank that still runs after a bounded time kills itself and its child processes. An
agent ends when its ranks have ended.

The command is named by its process number and its start time, so a later process with the same
number does not count. The process table is read once a second. Ranks of Slurm have no such command:
their job ends them.
"""

import os
import signal
import threading
import time
from contextlib import suppress

import psutil

VARIABLE = "LONGHAUL_STARTED_BY"
"""Environment variable of a rank: the process that started it, and seconds to end in."""
SECONDS = 3600.0
"""Seconds from SIGTERM to SIGKILL; the timeout of a step on CPU ranks (`recipes.nemo2.guards`)."""
PAUSE = 1.0
"""Seconds between two looks at the process table."""
CLOCK_SECONDS = 60.0
"""How far apart two processes may see the start of a third if the clock is set in between."""


def process_of(number: int, started: float) -> psutil.Process | None:
    """Return the process with a number that started at a Unix time; None if it has ended."""
    with suppress(psutil.Error):
        process = psutil.Process(number)
        if abs(process.create_time() - started) < CLOCK_SECONDS and _runs(process):
            return process
    return None


def value(seconds: float = SECONDS) -> str:
    """Return this process as `end_with_starter` reads it."""
    process = psutil.Process()
    return f"{process.pid}:{process.create_time():.2f}:{seconds:g}"


def variables(seconds: float = SECONDS) -> dict[str, str]:
    """Return the environment of ranks that end with this process, in the given seconds."""
    return {VARIABLE: value(seconds)}


def end_with_starter(said: str | None = None) -> None:
    """Watch the process that `said` names, and this process's parent, in a daemon thread.

    `said` is a value of VARIABLE, by default the one in the environment; without one nothing is
    watched.
    """
    said = os.environ.get(VARIABLE, "") if said is None else said
    if not said:
        return
    number, started, seconds = said.split(":")
    starter, parent = process_of(int(number), float(started)), psutil.Process().parent()
    # Of a container, the parent may be outside.
    watched = [process for process in (starter, parent) if process is not None]
    threading.Thread(
        target=_watch, args=(watched if starter else [], float(seconds)), name="starter",
        daemon=True,
    ).start()  # fmt: skip


def _watch(watched: list[psutil.Process], seconds: float) -> None:
    """End this process when one of the others has ended, or none is left to watch."""
    while watched and all(map(_runs, watched)):
        time.sleep(PAUSE)
    if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):  # nothing that would save
        _end_children(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(seconds)
    _end_children(signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _runs(process: psutil.Process) -> bool:
    """Return whether a process has not ended; a zombie has."""
    with suppress(psutil.Error):
        ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return process.is_running() and process.status() not in ended
    return False


def _end_children(which: signal.Signals) -> None:
    """Signal what this process has started: data workers and savers."""
    with suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.send_signal(which)
