# SPDX-License-Identifier: Apache-2.0
"""States of a run's jobs according to Slurm, if its programs are on this machine; light."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ASKED_SECONDS = 10.0
"""Time limit for a program of Slurm to answer."""
OVER = frozenset(
    (
        "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE",
        "BOOT_FAIL", "REVOKED",
    )
)  # fmt: skip
"""Slurm's states of a job that will not run again."""
VARIABLES = ("SQUEUE_STATES", "SQUEUE_PARTITION", "SQUEUE_ACCOUNT", "SQUEUE_USERS")
"""Environment variables that may make squeue leave out jobs."""
FORGOTTEN = "Invalid job id"
"""Error message of squeue for a single job that Slurm has forgotten."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job of a chain."""

    name: str
    number: str
    state: str = ""
    """Slurm's state, such as PENDING; empty if Slurm was not asked or does not know the job."""
    not_asked: str = ""
    """Why Slurm was not asked; empty if it was."""

    @property
    def words(self) -> str:
        """Its state in words."""
        if self.not_asked:
            return "not asked"
        return self.state.lower() or "not known to Slurm"

    @property
    def is_live(self) -> bool:
        """Whether it is queued or runs."""
        return bool(self.state) and self.state not in OVER


def job_numbers(run: Path) -> dict[str, str]:
    """Return the numbers of the jobs that were last submitted into a run folder, by name.

    Raises ValueError if the record of them cannot be read.
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

    Raises ValueError if the record of them cannot be read.
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
    """Return the state of each job that Slurm knows, from the queue or else from the accounting.

    The second value is the reason why the queue did not answer; empty if it did.
    """
    if not numbers:
        return {}, ""
    listed = ",".join(numbers)
    queued, not_asked = _rows(("squeue", "--noheader", "--format=%i|%T", f"--jobs={listed}"))
    ended, _ = _rows(
        ("sacct", "--noheader", "--parsable2", "-X", "--format=JobID,State", f"--jobs={listed}")
    )
    found = {number: _of_array(ended, number) for number in numbers}
    found.update({number: _of_array(queued, number) for number, _ in _arrays(queued)})
    return {number: found[number] for number in numbers if found.get(number)}, not_asked


def _arrays(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return rows with the number of the array for that of each of its jobs, as 12 for 12_3."""
    return [(number.partition("_")[0], state) for number, state in rows]


def _of_array(rows: list[tuple[str, str]], number: str) -> str:
    """Return the state of a job, of an array the one that tells most; empty if there is none."""
    states = [state for of, state in _arrays(rows) if of == number]
    for wanted in (
        lambda state: state == "RUNNING",
        lambda state: state not in OVER,
        lambda state: state != "COMPLETED",
    ):
        if told := [state for state in states if wanted(state)]:
            return told[0]
    return states[-1] if states else ""


def _rows(command: Iterable[str]) -> tuple[list[tuple[str, str]], str]:
    """Return the pairs that a program of Slurm prints, and why it did not answer, if so."""
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
