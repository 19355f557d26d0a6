# SPDX-License-Identifier: Apache-2.0
"""Checks of a chain of jobs before any of them is submitted; imports nemo-run."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longhaul.jobs.ladder_run import LadderRun
from longhaul.jobs.slurm_queue import FORGOTTEN, OVER, job_numbers
from slurm.cluster_file import ClusterFile
from slurm.executors import executor
from slurm.experiment import nothing_to_read

PLAIN = "env -u SQUEUE_STATES -u SQUEUE_PARTITION -u SQUEUE_ACCOUNT -u SQUEUE_USERS"
"""Unsets the variables that make squeue leave out jobs."""


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
    states = [(row[0].partition("_")[0], row[1]) for row in rows if row]  # 12_3 is of array 12
    live = {number: state for number, state in states if number in names and state not in OVER}
    if live:
        shown = ", ".join(f"{number} {names[number]} ({state.lower()})"
                          for number, state in live.items())  # fmt: skip
        raise ValueError(
            f"jobs of {plan.run} are still in the queue: {shown}; wait for them, or stop them: "
            f"scancel {' '.join(live)}"
        )


def require_shared(plan: LadderRun, file: ClusterFile, data: Sequence[Path] = ()) -> None:
    """Raise ValueError if a cluster behind a tunnel does not see what was written here.

    `data` are further folders that jobs read.
    """
    if file.tunnel.kind == "local":
        return
    record = plan.run.resolve() / "run.json"
    tunnel = _executor(plan, file).tunnel
    with nothing_to_read():
        tunnel.connect()
        unseen = [
            path
            for path in (record, *data)
            if tunnel.run(f"test -e {shlex.quote(str(path))}", warn=True, hide=True).return_code
        ]
    if record in unseen:
        raise ValueError(
            f"{file.tunnel.host} does not see {record}; --out and --store have to be on a file "
            "system that this machine and the cluster share, at the same path"
        )
    if unseen:
        raise ValueError(
            f"{file.tunnel.host} does not see {unseen[0]}, which jobs of the ladder read; it has "
            "to be on a file system that this machine and the cluster share, at the same path "
            "(HF_HOME names the cache of data sets)"
        )


def _executor(plan: LadderRun, file: ClusterFile) -> Any:
    """Return an executor for commands on the login node; it submits no job."""
    folder: Path = plan.run / "launch"
    return executor(file, nodes=1, ranks_per_node=1, folder=folder, outcome=folder / "outcome")
