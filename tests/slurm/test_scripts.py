# SPDX-License-Identifier: Apache-2.0
"""The batch scripts of a chain: as they were read and committed, and as Slurm takes them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden.rewrite import SCRIPTS
from tests.slurm.support.scripts_of import NODES, dry_scripts

SHELLCHECK = Path(sys.executable).parent / "shellcheck"


@pytest.fixture(scope="module", params=NODES)
def scripts(request, tmp_path_factory):
    """Return how many nodes, and the scripts of a chain on them."""
    folder = tmp_path_factory.mktemp("scripts")
    return request.param, dry_scripts(folder, request.param)


def test_the_scripts_are_those_that_were_committed(scripts):
    nodes, found = scripts
    there = {path.stem: path.read_text() for path in (SCRIPTS / f"{nodes}_nodes").glob("*.sh")}
    assert found == there, "read `git diff` after `make golden`"


def test_bash_reads_them_and_shellcheck_finds_no_error(scripts, tmp_path):
    for name, text in scripts[1].items():
        path = tmp_path / f"{name}.sh"
        path.write_text(text)
        subprocess.run(["bash", "-n", path], check=True)
        # What nemo-run's template leaves unquoted is a warning or a note.
        subprocess.run([SHELLCHECK, "--severity=error", path], check=True)


def test_slurm_would_take_them(scripts, slurm, tmp_path):
    for name, text in scripts[1].items():
        path = tmp_path / f"{name}.sh"
        path.write_text(text)
        slurm.run("sbatch", "--test-only", "--partition=gpus", path)  # raises with its words
