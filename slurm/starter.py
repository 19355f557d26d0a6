# SPDX-License-Identifier: Apache-2.0
"""End the ranks of this machine when the command that started them has ended; light.

A command that is killed with SIGKILL cannot stop its ranks, and its torchrun agent runs on. So each
rank watches the command, and its own parent (the agent), from a thread. When either has ended, the
rank sends itself SIGTERM: a rank in training saves at the end of its step and stops, and any other
ends at once. A rank that still runs after a bounded time kills itself and its child processes. An
agent ends when its ranks have ended.

The command is named by its process number and its start time, so a later process with the same
number does not count. The wait is the kernel's (`pidfd_open`); where that is not allowed, the
process table is read once a second. Ranks of Slurm have no such command: their job ends them.
"""

import os
import select
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

VARIABLE = "LONGHAUL_STARTED_BY"
"""Environment variable of a rank: the process that started it, and seconds to end in."""
SECONDS = 3600.0
"""Seconds from SIGTERM to SIGKILL; the timeout of a step on CPU ranks (`recipes.nemo2.guards`)."""
PAUSE = 1.0
"""Seconds between two looks at the process table."""
ENDED = ("Z", "X", "x")
"""States of a process that has ended and is still listed."""


@dataclass(frozen=True)
class Process:
    """A process that ran at one time; light to send as a string."""

    number: int
    started: int
    """Clock ticks since the machine started."""

    def __str__(self) -> str:
        return f"{self.number}:{self.started}"

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return _state(self.number) == (self.started, True)


def value(seconds: float = SECONDS) -> str:
    """Return this process as `end_with_starter` reads it; empty on a system without /proc."""
    process = _process(os.getpid())
    return "" if process is None else f"{process}:{seconds:g}"


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
    watched = [Process(int(number), int(started))]
    if (parent := _process(os.getppid())) is not None:
        watched.append(parent)
    threading.Thread(
        target=_watch, args=(watched, float(seconds)), name="starter", daemon=True
    ).start()


def _watch(watched: list[Process], seconds: float) -> None:
    _wait(watched)
    if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):  # nothing that would save
        _end_children(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(seconds)
    _end_children(signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait(watched: list[Process]) -> None:
    """Return when one of the processes has ended."""
    descriptors: list[int] = []
    try:
        descriptors += [os.pidfd_open(process.number) for process in watched]
    except (OSError, AttributeError):  # it has ended, the kernel is old, or a sandbox forbids it
        while all(process.runs for process in watched):
            time.sleep(PAUSE)
    else:
        # A descriptor stays with its process, so only now the start times tell.
        if all(process.runs for process in watched):
            poll = select.poll()
            for descriptor in descriptors:
                poll.register(descriptor, select.POLLIN)
            poll.poll()
    for descriptor in descriptors:
        os.close(descriptor)


def _end_children(which: signal.Signals) -> None:
    """Signal what this process has started: data workers and savers."""
    with suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.send_signal(which)


def _process(number: int) -> Process | None:
    state = _state(number)
    return Process(number, state[0]) if state is not None else None


def _state(number: int) -> tuple[int, bool] | None:
    """Return when a process started and whether it runs; None if there is none."""
    try:
        text = Path(f"/proc/{number}/stat").read_text(errors="replace")
    except OSError:
        return None
    words = text.rpartition(")")[2].split()  # a name may contain blanks and parentheses
    return int(words[19]), words[0] not in ENDED
