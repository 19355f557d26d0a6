# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a job ended, for the script that started them; light.

Exit codes do not say it: srun reports the largest of all ranks', and a rank that is ended because
another has ended has one of its own. So rank 0 leaves a word and a sentence in a file,

    finished | the stage has all its steps
    continue | saved at step 120 of 400, told to stop (SIGUSR1)
    refused  | the gate is shut: ...
    failed   | preflight found 1 failure(s): ...

and the batch script reads it: a job that is to continue is queued again and costs no attempt; one
that is refused ends the chain; one that failed, or left no word, is queued again a few times.
"""

import os
import time
from pathlib import Path
from typing import Literal, get_args

from data.files.whole import write_text

VARIABLE = "LONGHAUL_OUTCOME"
"""Environment variable with the path of the file; without it nothing is written."""
State = Literal["finished", "continue", "refused", "failed"]
FAILURES, BAD_NODES, STEPS = "failures", "bad_nodes", "steps"
"""Beside the file: failed attempts in a row, nodes to leave out, steps that the last began from."""
WORD_SECONDS = 60.0
"""How long ranks wait for rank 0's word, which may be on its way through a shared file system."""


def _place(of: str = "") -> Path | None:
    said = os.environ.get(VARIABLE)
    return Path(f"{said}.{of}" if of else said) if said else None


def leave(state: State, said: str) -> None:
    """Write how this job ended; a sentence on one line."""
    if (path := _place()) is not None:
        write_text(path, f"{state} {' '.join(said.split())}\n")


def await_word(seconds: float = WORD_SECONDS) -> None:
    """Wait for the word: a rank that ends in error before it is written takes rank 0 with it."""
    path, end = _place(), time.monotonic() + seconds
    while path is not None and not path.exists() and time.monotonic() < end:
        time.sleep(0.1)


def outcome(path: Path) -> tuple[State | None, str]:
    """Return the word and the sentence at a path; None where no word was left."""
    state, _, said = path.read_text().strip().partition(" ") if path.exists() else ("", "", "")
    known = {one: one for one in get_args(State)}
    return known.get(state), said


def record_failure(path: Path, said: str) -> None:
    """Write that a job failed whose ranks left no word, as those that were killed."""
    if outcome(path)[0] is None:
        write_text(path, f"failed {' '.join(said.split())}\n")


def began(steps: int) -> None:
    """Note the steps that an attempt starts from; failures before progress do not count on."""
    at, failures = _place(STEPS), _place(FAILURES)
    if at is None or failures is None:
        return
    if at.exists() and at.read_text().strip() != str(steps):
        failures.unlink(missing_ok=True)
    write_text(at, f"{steps}\n")


def blame(node: str) -> None:
    """Note a node that the job's next attempt does not run on."""
    if (path := _place(BAD_NODES)) is not None:
        with path.open("a") as file:
            file.write(f"{node}\n")
