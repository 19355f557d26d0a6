# SPDX-License-Identifier: Apache-2.0
"""Submit two jobs of two nodes through nemo-run, the second after the first; write their handles.

Run in a git tree, which is what the jobs get. `NEMORUN_HOME` says where the experiment goes.
"""

import json
import subprocess
import sys
from pathlib import Path

import nemo_run as run


def executor() -> run.SlurmExecutor:
    """Return two nodes of one task each, with no container."""
    return run.SlurmExecutor(
        account="tests",
        partition="tests",
        nodes=2,
        ntasks_per_node=1,
        time="00:05:00",
        tunnel=run.LocalTunnel(job_dir=""),  # $NEMORUN_HOME/experiments: nothing is copied
        packager=run.GitArchivePackager(include_submodules=False),  # else it walks every folder
        additional_parameters={"kill_on_invalid_dep": "yes"},
        poll_estimated_start_time=False,
    )


def submit(folder: Path) -> None:
    """Submit a script that waits for the file `go`, then a Python function."""
    said = "import os, recipes; print(os.environ['SLURMD_NODENAME'], recipes.__file__)"
    with run.Experiment("chain") as experiment:
        first = experiment.add(
            run.Script(
                inline=f"""
                until [ -e {folder}/go ]; do sleep 0.1; done
                echo $SLURMD_NODENAME $SLURM_PROCID $PWD >>{folder}/first"""
            ),
            executor=executor(),
            name="first",
        )
        experiment.add(
            run.Partial(subprocess.getoutput, cmd=f'python -c "{said}" >>{folder}/second'),
            executor=executor(),
            name="second",
            dependencies=[first],
        )
        experiment.run(detach=True)
        (folder / "handles").write_text(json.dumps([job.handle for job in experiment.jobs]))


# Without the guard each rank would submit the chain again: nemo-run's runner imports this file.
if __name__ == "__main__":
    submit(Path(sys.argv[1]))
