# SPDX-License-Identifier: Apache-2.0
"""Quoting of texts and folders in nemo-run's commands and scripts for Slurm.

nemo-run joins what it is given into its commands and scripts unquoted, but for the values of
`#SBATCH`. Here each text, and the folder of the jobs wherever it is written, is quoted for the
shell, and the code of a job is unpacked without a shell. What quoting cannot protect is refused:
paths by `slurm.nameable`, texts of the cluster file by `slurm.cluster_file`.
"""

import logging
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import nemo_run as run
from nemo_run.core.execution import slurm
from nemo_run.core.execution.slurm import SlurmJobDetails, get_packaging_job_key
from nemo_run.core.tunnel.client import PackagingJob

from slurm.nameable import RUN_FOLDER


def word(text: str) -> str:
    """Return a text as one word of a script: bash reads the same text, and runs nothing in it.

    nemo-run reads the script as well: it fills in `$`, and replaces its folder if there is no
    container. An empty pair of quotes, which is nothing to bash, hides both.
    """
    return shlex.quote(text).replace("$", "$''").replace(RUN_FOLDER, f"/''{RUN_FOLDER[1:]}")


@dataclass(kw_only=True)
class QuotedJobDetails(SlurmJobDetails):
    """nemo-run's paths of a job's logs, those of the ranks quoted for the script."""

    @property
    def srun_stdout(self) -> Path:
        """Return the log of the ranks; the script sets its variable."""
        return Path(shlex.quote(str(self.folder)), super().srun_stdout.name)

    @property
    def ls_term(self) -> str:
        """Return the pattern of all logs."""
        return f"{shlex.quote(str(self.folder))}/log*"


@dataclass(kw_only=True)
class QuotedTunnel(run.LocalTunnel):
    """nemo-run's commands on this machine, with the folder quoted in each."""

    job_dir: str

    def _set_job_dir(self, experiment_id: str) -> None:
        super()._set_job_dir(experiment_id)
        self.job_dir = shlex.quote(self.job_dir)


def pack(executors: Sequence[run.SlurmExecutor]) -> None:
    """Unpack the committed tree into the folder of each job, where its ranks run.

    nemo-run would pass the paths to a shell and work in the tree itself; it then unpacks nothing.
    """
    logging.getLogger(slurm.__name__).setLevel(logging.WARNING)  # it warns that it packs nothing
    packed = {}
    for one in executors:
        folder = Path(one.job_dir)
        if not (folder / "code").exists():
            (folder / "code").mkdir(parents=True)
            archive = subprocess.run(
                ["git", "-C", _top(), "archive", "--format=tar", "HEAD"],
                check=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            command = ["tar", "-x", "-C", str(folder / "code")]
            subprocess.run(command, check=True, input=archive.stdout)
        packed[get_packaging_job_key(one.experiment_id, folder.name)] = PackagingJob(symlink=False)
        if isinstance(one.tunnel, QuotedTunnel):
            one.job_details.folder = one.job_dir
    for one in executors:
        one.tunnel.packaging_jobs.update(packed)


def _top() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--show-toplevel"], check=True, stdout=subprocess.PIPE, text=True
    )
    return found.stdout.removesuffix("\n")
