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
FORGOTTEN = "Invalid job id"
"""What squeue says of a single job that Slurm has forgotten."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job of a chain."""

    name: str
    number: str
    state: str = ""
    """Slurm's word, as PENDING; empty where Slurm was not asked or does not know the job."""
    not_asked: str = ""
    """Why Slurm was not asked; empty where it was."""

    @property
    def words(self) -> str:
        """What Slurm says of it, in words."""
        if self.not_asked:
            return "not asked"
        return self.state.lower() or "not known to Slurm"

    @property
    def is_live(self) -> bool:
        """Whether it is queued or runs."""
        return bool(self.state) and self.state not in OVER


def job_numbers(run: Path) -> dict[str, str]:
    """Return the numbers of the jobs that were last submitted into a run folder, by name.

    Raises ValueError where the record of them cannot be read.
    """
    path = run / "launch" / "jobs.json"
    try:
        numbers = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(numbers, dict) or not all(
        isinstance(number, str | int) and str(number).strip() for number in numbers.values()
    ):
        raise ValueError(f"{path} does not list jobs with their numbers")
    return {name: str(number) for name, number in numbers.items()}


def submitted(run: Path) -> list[SlurmJob]:
    """Return the jobs that were last submitted into a run folder, with their states.

    Raises ValueError where the record of them cannot be read.
    """
    numbers = job_numbers(run)
    states, not_asked = _states(list(numbers.values()))
    return [
        SlurmJob(
            name=name,
            number=number,
            state=states.get(number, ""),
            not_asked="" if number in states else not_asked,
        )
        for name, number in numbers.items()
    ]


def _states(numbers: list[str]) -> tuple[dict[str, str], str]:
    """Return Slurm's word for each job that it knows: of the queue, else of the accounting.

    With it why the queue does not say which it knows, empty where it does.
    """
    if not numbers:
        return {}, ""
    listed = ",".join(numbers)
    queued, not_asked = _rows(("squeue", "--noheader", "--format=%i|%T", f"--jobs={listed}"))
    ended, _ = _rows(
        ("sacct", "--noheader", "--parsable2", "-X", "--format=JobID,State", f"--jobs={listed}")
    )
    found = dict(ended)
    found.update(queued)
    return {number: found[number] for number in numbers if number in found}, not_asked


def _rows(command: Iterable[str]) -> tuple[list[tuple[str, str]], str]:
    """Return the pairs that a program of Slurm prints; with them why it does not answer, if so."""
    program, *words = command
    if shutil.which(program) is None:
        return [], f"there is no {program} on this machine"
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    try:
        said = subprocess.run(
            [program, *words], capture_output=True, text=True, check=False, env=environment,
            timeout=ASKED_SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [], f"{program} did not answer in {ASKED_SECONDS:.0f} s"
    except OSError as error:
        return [], f"{program} does not start ({error.strerror})"
    rows = (line.split("|") for line in said.stdout.splitlines())
    found = [
        (row[0].strip(), row[1].split()[0]) for row in rows if len(row) == 2 and row[1].strip()
    ]
    if not said.returncode or FORGOTTEN in said.stderr:
        return found, ""
    last = (said.stderr.strip().splitlines() or [f"exit code {said.returncode}"])[-1]
    return found, f"{program} fails ({last.removeprefix(f'{program}: ')})"
