# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a job ended, for the script that started them; light, standard library alone.

Exit codes do not say it: srun reports the largest of all ranks', and a rank that is ended because
another has ended has one of its own. So rank 0 leaves a word and a sentence in a file,

    finished | the stage has all its steps
    continue | saved at step 120 of 400, told to stop (SIGUSR1)
    refused  | the gate is shut: ...

and the batch script reads it: a job that is to continue is queued again and costs no attempt; one
that is refused ends the chain; one that left no word failed, and is queued again a few times.
"""

import os
from pathlib import Path
from typing import Literal, get_args

VARIABLE = "LONGHAUL_OUTCOME"
"""Environment variable with the path of the file; without it nothing is written."""
State = Literal["finished", "continue", "refused"]


def leave(state: State, said: str) -> None:
    """Write how this job ended; a sentence on one line."""
    place = os.environ.get(VARIABLE)
    if not place:
        return
    path = Path(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(f"{state} {' '.join(said.split())}\n")
    temporary.rename(path)


def outcome(path: Path) -> tuple[State | None, str]:
    """Return the word and the sentence at a path; None where no word was left."""
    state, _, said = path.read_text().strip().partition(" ") if path.exists() else ("", "", "")
    known = {one: one for one in get_args(State)}
    return known.get(state), said


def blame(node: str) -> None:
    """Note a node that the job's next attempt does not run on."""
    place = os.environ.get(VARIABLE)
    if place:
        with Path(f"{place}.bad_nodes").open("a") as file:
            file.write(f"{node}\n")
