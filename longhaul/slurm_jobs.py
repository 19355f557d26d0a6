# SPDX-License-Identifier: Apache-2.0
"""What Slurm says of the jobs of a run, where its programs are on this machine; light."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ASKED_SECONDS = 10.0
"""How long a program of Slurm may take to answer."""
OVER = frozenset(
    (
        "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE",
        "BOOT_FAIL", "REVOKED",
    )
)  # fmt: skip
"""Slurm's words for a job that will not run again."""
VARIABLES = ("SQUEUE_STATES", "SQUEUE_PARTITION", "SQUEUE_ACCOUNT", "SQUEUE_USERS")
"""By which a shell may have squeue leave jobs out."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job of a chain."""

    name: str
    number: str
    state: str = ""
    """Slurm's word, as PENDING; empty where Slurm was not asked or does not know the job."""

    @property
    def is_live(self) -> bool:
        """Whether it is queued or runs."""
        return bool(self.state) and self.state not in OVER


def submitted(run: Path) -> list[SlurmJob]:
    """Return the jobs that were last submitted into a run folder, with their states.

    Raises ValueError where the record of them cannot be read.
    """
    path = run / "launch" / "jobs.json"
    try:
        numbers = json.loads(path.read_text())
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(numbers, dict):
        raise ValueError(f"{path} does not name jobs with their numbers")
    states = _states(list(map(str, numbers.values())))
    return [
        SlurmJob(name=name, number=str(number), state=states.get(str(number), ""))
        for name, number in numbers.items()
    ]


def _states(numbers: list[str]) -> dict[str, str]:
    """Return Slurm's word for each job that it knows: of the queue, else of the accounting."""
    if not numbers:
        return {}
    listed = ",".join(numbers)
    queued = _rows(("squeue", "--noheader", "--format=%i|%T", f"--jobs={listed}"))
    ended = _rows(
        ("sacct", "--noheader", "--parsable2", "-X", "--format=JobID,State", f"--jobs={listed}")
    )
    found = dict(ended)
    found.update(queued)
    return {number: found[number] for number in numbers if number in found}


def _rows(command: Iterable[str]) -> list[tuple[str, str]]:
    """Return the pairs that a program of Slurm prints; none where it is not here or fails."""
    program, *words = command
    if shutil.which(program) is None:
        return []
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    try:
        said = subprocess.run(
            [program, *words], capture_output=True, text=True, check=False, env=environment,
            timeout=ASKED_SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = (line.split("|") for line in said.stdout.splitlines())
    return [(row[0].strip(), row[1].split()[0]) for row in rows if len(row) == 2 and row[1].strip()]
