# SPDX-License-Identifier: Apache-2.0
"""nemo-run's Slurm executor, without containers, on the Slurm of the tests."""

import json
import re
import subprocess
import sys

import pytest

from tests.slurm.support.real_slurm import TREE


@pytest.mark.slow
def test_nemo_run_submits_a_chain_whose_ranks_run_in_the_packed_tree(slurm, tmp_path):
    # A clone, since the packager unpacks its archive beside the files that it packs.
    subprocess.run(["git", "clone", "--quiet", "--shared", TREE, tmp_path / "tree"], check=True)
    slurm.run(
        sys.executable,
        TREE / "tests/slurm/support/nemo_run_chain.py",
        tmp_path,
        cwd=tmp_path / "tree",
        variables={"NEMORUN_HOME": str(tmp_path / "home")},
    )
    handles = json.loads((tmp_path / "handles").read_text())
    first, second = (int(re.fullmatch(r"\w+://\w+/(\d+)", handle)[1]) for handle in handles)
    try:
        assert slurm.job(second)["Dependency"] == f"afterok:{first}(unfulfilled)"
        assert slurm.job(second)["KillOInInvalidDependent"] == "Yes"  # as scontrol spells it
    finally:
        (tmp_path / "go").touch()
    assert slurm.wait(first, timeout_seconds=300) == "COMPLETED"
    assert slurm.wait(second, timeout_seconds=300) == "COMPLETED"

    (experiment,) = (tmp_path / "home/experiments/chain").iterdir()
    assert sorted((tmp_path / "first").read_text().splitlines()) == [
        f"n{rank + 1} {rank} {experiment}/first/code" for rank in range(2)
    ]
    assert sorted((tmp_path / "second").read_text().splitlines()) == [
        f"{node} {experiment}/second/code/recipes/__init__.py" for node in ("n1", "n2")
    ]
