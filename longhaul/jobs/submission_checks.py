# SPDX-License-Identifier: Apache-2.0
"""Checks of a chain of jobs before any of them is submitted; imports nemo-run."""

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longhaul.jobs.cluster_checks import Folder, lacking
from longhaul.jobs.ladder_run import LadderRun
from longhaul.jobs.slurm_queue import FORGOTTEN, OVER, job_numbers
from slurm.cluster_file import ClusterFile
from slurm.executors import executor, require_reached
from slurm.experiment import nothing_to_read

PACKAGES = ("recipes", "custom_modules", "data", "eval", "slurm", "longhaul")
FILES_READ = (".py", ".yaml", ".jinja")
PLAIN = "env -u SQUEUE_STATES -u SQUEUE_PARTITION -u SQUEUE_ACCOUNT -u SQUEUE_USERS"
"""Unsets the variables that make squeue leave out jobs."""


def require(file: ClusterFile, used: Sequence[Folder]) -> list[str]:
    """Raise ValueError for what would fail on the cluster; return notes for the user."""
    if file.executor != "slurm":
        raise ValueError(
            f"cluster {file.name} has executor {file.executor}; a chain needs a scheduler with "
            "job dependencies: use slurm, or --executor local"
        )
    found = lacking(file, used)
    if found:
        raise ValueError(f"cluster {file.name}: {'; '.join(found)}")
    if file.tunnel.kind == "ssh":
        require_reached(file)
    return _uncommitted()


def _uncommitted() -> list[str]:
    """Return notes on files that jobs do not get: nemo-run packs only committed files."""
    try:
        said = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=all"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise ValueError("jobs get a git tree, and git is not installed here; install it") from None
    if said.returncode:
        reason = " ".join(said.stderr.split()).removeprefix("fatal: ")
        raise ValueError(
            "jobs get the git tree of the folder that they are submitted from, and git refuses "
            f"{Path.cwd()} ({reason}); run the command in a clone of Longhaul"
        )
    lines = said.stdout.splitlines()
    changed = sum(not line.startswith("?? ") for line in lines)
    new = [line[3:] for line in lines if line.startswith("?? ") and _is_ours(line[3:])]
    notes = []
    if changed:
        notes.append(f"{changed} changed files are not committed; jobs get the committed tree")
    if new:
        shown = ", ".join(new[:4]) + (", ..." if len(new) > 4 else "")
        notes.append(f"{len(new)} new files are not in git, and jobs do not get them: {shown}")
    return notes


def _is_ours(path: str) -> bool:
    return path.partition("/")[0] in PACKAGES and path.endswith(FILES_READ)


def require_idle(plan: LadderRun, file: ClusterFile) -> None:
    """Raise ValueError while jobs that were submitted into this run folder have not ended."""
    names = {number: name for name, number in job_numbers(plan.run).items()}
    if not names:
        return
    command = f"{PLAIN} squeue --noheader --format='%i %T' --jobs={','.join(names)}"
    with nothing_to_read():
        said = _executor(plan, file).slurm.run(command, warn=True, hide=True)
    if said.return_code:
        words = " ".join((said.stderr or said.stdout).split())
        if FORGOTTEN in words:
            return
        raise ValueError(f"squeue does not say whether the jobs of {plan.run} are over: {words}")
    rows = (line.split() for line in said.stdout.splitlines())
    live = {row[0]: row[1] for row in rows if row and row[0] in names and row[1] not in OVER}
    if live:
        shown = ", ".join(f"{number} {names[number]} ({state.lower()})"
                          for number, state in live.items())  # fmt: skip
        raise ValueError(
            f"jobs of {plan.run} are still in the queue: {shown}; wait for them, or stop them: "
            f"scancel {' '.join(live)}"
        )


def require_shared(plan: LadderRun, file: ClusterFile) -> None:
    """Raise ValueError if a cluster behind a tunnel does not see what was written here."""
    if file.tunnel.kind == "local":
        return
    record = plan.run.resolve() / "run.json"
    tunnel = _executor(plan, file).tunnel
    with nothing_to_read():
        tunnel.connect()
        command = f"test -e {shlex.quote(str(record))}"
        unseen = tunnel.run(command, warn=True, hide=True).return_code
    if unseen:
        raise ValueError(
            f"{file.tunnel.host} does not see {record}; --out and --store have to be on a file "
            "system that this machine and the cluster share, at the same path"
        )


def _executor(plan: LadderRun, file: ClusterFile) -> Any:
    """Return an executor for commands on the login node; it submits no job."""
    folder: Path = plan.run / "launch"
    return executor(file, nodes=1, ranks_per_node=1, folder=folder, outcome=folder / "outcome")
