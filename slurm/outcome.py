# SPDX-License-Identifier: Apache-2.0
"""Outcome of a job's ranks, for the batch script that started them.

Exit codes are not enough: srun reports the largest of all ranks, and a rank that is killed because
another ended has its own. So rank 0 writes a word and a sentence to a file,

    finished | the stage has all its steps
    continue | saved at step 120 of 400, told to stop (SIGUSR1)
    refused  | the gate is shut: ...
    stopped  | saved at step 120 of 400, as RUN/stop asked
    failed   | preflight found 1 failure(s): ...

and the batch script reads it: `continue` requeues the job without counting an attempt; `refused`
and `stopped` end the chain; a job that failed, or wrote no outcome, is requeued a few times.
"""

import os
import time
from pathlib import Path
from typing import Literal, get_args

from data.files.whole import write_text

VARIABLE = "LONGHAUL_OUTCOME"
"""Environment variable with the path of the file; without it nothing is written."""
State = Literal["finished", "continue", "refused", "stopped", "failed"]
FAILURES, BAD_NODES, STEPS = "failures", "bad_nodes", "steps"
"""Suffixes next to the file: failures in a row, excluded nodes, first step of the last attempt."""
WORD_SECONDS = 60.0
"""How long ranks wait for rank 0's outcome, which may be delayed by a shared file system."""


def _place(of: str = "") -> Path | None:
    said = os.environ.get(VARIABLE)
    return Path(f"{said}.{of}" if of else said) if said else None


def write_outcome(state: State, said: str) -> None:
    """Write the outcome of this job, with a sentence on one line."""
    if (path := _place()) is not None:
        write_text(path, f"{state} {' '.join(said.split())}\n")


def wait_for_outcome(seconds: float = WORD_SECONDS) -> None:
    """Wait for the outcome: a rank that fails before it is written takes rank 0 down with it."""
    path, end = _place(), time.monotonic() + seconds
    while path is not None and not path.exists() and time.monotonic() < end:
        time.sleep(0.1)


def outcome(path: Path) -> tuple[State | None, str]:
    """Return the word and the sentence at a path; the word is None if none was written."""
    state, _, said = path.read_text().strip().partition(" ") if path.exists() else ("", "", "")
    known = {one: one for one in get_args(State)}
    return known.get(state), said


def record_failure(path: Path, said: str) -> None:
    """Write that a job failed if its ranks wrote no outcome, as when they were killed."""
    if outcome(path)[0] is None:
        write_text(path, f"failed {' '.join(said.split())}\n")


def record_start(steps: int) -> None:
    """Record the step that an attempt starts from; progress resets the count of failures."""
    at, failures = _place(STEPS), _place(FAILURES)
    if at is None or failures is None:
        return
    if at.exists() and at.read_text().strip() != str(steps):
        failures.unlink(missing_ok=True)
    write_text(at, f"{steps}\n")


def exclude_node(node: str) -> None:
    """Record a node that the job's next attempt must not run on."""
    if (path := _place(BAD_NODES)) is not None:
        with path.open("a") as file:
            file.write(f"{node}\n")
