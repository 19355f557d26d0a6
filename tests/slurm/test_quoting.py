# SPDX-License-Identifier: Apache-2.0
"""Batch scripts of folders that a shell would split, and folders that no script can name."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import nemo_run as run
import pytest

from slurm.cluster_file import ClusterFile, Container, Slurm, Tunnel
from slurm.executors import executor
from slurm.experiment import Job, scripts
from tests.slurm.support.real_slurm import TREE
from tests.warm_start import path_with

SITE = {"name": "mine", "slurm": Slurm(account="me")}
SUBMIT = """
import shlex, subprocess, sys
from pathlib import Path
import nemo_run as run
from slurm.cluster_file import ClusterFile, Slurm
from slurm.experiment import Job, submit
from tests.slurm.test_quoting import made
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    slurm = Slurm(account="tests", partition="tests", time="00:30:00", ask_for_gpus="none",
                  exclusive=False, mem=None)
    executor = made(folder, slurm=slurm, python=sys.prefix)
    task = run.Partial(subprocess.getoutput, f"pwd >{shlex.quote(str(folder / 'pwd'))}")
    print(submit("ladder", [Job("stage", task, executor)], folder)["stage"])
"""


def made(folder: Path, **fields) -> run.SlurmExecutor:
    site = ClusterFile(**(SITE | fields))
    return executor(site, nodes=1, ranks_per_node=1, folder=folder, outcome=folder / "outcome")


def test_a_script_names_a_folder_with_blanks_as_one_word(tmp_path):
    folder = tmp_path / "the $runs of Jürgen's group"
    job = Job("stage", run.Partial(subprocess.getoutput, "true"), made(folder))
    script = scripts("ladder", [job], folder)["stage"]
    (output,) = (line for line in script.splitlines() if line.startswith("#SBATCH --output="))
    assert Path(shlex.split(output)[1].removeprefix("--output=")).is_relative_to(folder)
    (srun,) = (line for line in script.splitlines() if "fdl_runner" in line)
    words = shlex.split(srun)
    for word in (words[words.index("--output") + 1], words[words.index("--chdir") + 1], words[-1]):
        assert Path(word).is_relative_to(folder / "experiments")
    (outcome,) = (line for line in script.splitlines() if "LONGHAUL_OUTCOME=" in line)
    assert shlex.split(outcome)[1] == f"LONGHAUL_OUTCOME={folder / 'outcome'}"


def test_the_paths_of_a_relative_folder_are_absolute_since_ranks_start_elsewhere(tmp_path):
    folder = Path(os.path.relpath(tmp_path)) / "runs"
    job = Job("stage", run.Partial(subprocess.getoutput, "true"), made(folder))
    script = scripts("ladder", [job], folder)["stage"]
    (output,) = (line for line in script.splitlines() if line.startswith("#SBATCH --output="))
    (srun,) = (line for line in script.splitlines() if "fdl_runner" in line)
    (outcome,) = (line for line in script.splitlines() if "LONGHAUL_OUTCOME=" in line)
    words = shlex.split(srun)
    for path in (
        shlex.split(output)[1].removeprefix("--output="), shlex.split(outcome)[-1].split("=")[1],
        words[words.index("--output") + 1], words[words.index("--chdir") + 1], words[-1],
    ):  # fmt: skip
        assert Path(path).is_absolute(), path


@pytest.mark.slow
def test_slurm_runs_a_job_in_such_a_folder(slurm, tmp_path):
    folder = tmp_path / "the $runs of Jürgen's group"
    folder.mkdir()
    script = tmp_path / "submit.py"
    script.write_text(SUBMIT)
    shown = slurm.run(
        sys.executable, script, folder, cwd=TREE, variables={"PYTHONPATH": path_with(TREE)}
    )
    job = int(shown.split()[-1])
    slurm.wait(job)
    logs = "".join(path.read_text() for path in folder.rglob("*.out"))
    assert (folder / "pwd").is_file(), logs
    ran_in = Path((folder / "pwd").read_text().rstrip("\n"))
    assert ran_in.is_relative_to(folder / "experiments")
    assert (ran_in / "pyproject.toml").is_file()


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("100%", {}, "Slurm cannot name .*, which contains '%'"),
        ("nemo_run", {}, "nemo-run, which replaces it .*, cannot name .*'/nemo_run'"),
        ("a b", {"container": Container(image="/x.sqsh")}, "pyxis, .* cannot name .*' '"),
        ("a:b", {"container": Container(image="/x.sqsh")}, "pyxis, .* cannot name .*':'"),
        ("a b", {"tunnel": Tunnel(kind="ssh", host="h", user="me", folder="/x")}, "SSH tunnel"),
    ],
)
def test_a_folder_that_no_script_can_name_is_refused(name, fields, why):
    with pytest.raises(ValueError, match=why + ".*; choose another --out"):
        made(Path("/shared") / name, **fields)
    made(Path("/shared/ab"), **fields)
