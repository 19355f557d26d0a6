# SPDX-License-Identifier: Apache-2.0
"""Packages of others with the names of ours are named, and do not run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from longhaul.own_packages import NAMES
from tests.house.rooms import ROOMS, TREE

RAN = "raise SystemExit('ran')\n"


def command(path: Path, cwd: Path = Path("/")) -> subprocess.CompletedProcess[str]:
    """List the recipes with a folder first on the path but for the working folder."""
    search = os.pathsep.join(map(str, (path, TREE)))
    return subprocess.run(
        [sys.executable, "-m", "longhaul.cli", "recipes", "tiny"],
        cwd=cwd, env=os.environ | {"PYTHONPATH": search},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_every_package_of_ours_is_looked_at():
    assert {*NAMES} == {*ROOMS} - {"longhaul"}


@pytest.mark.parametrize("place", ["data.py", "eval/__init__.py"])
def test_a_file_of_the_users_is_named_and_not_run(tmp_path, place):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text(RAN)
    done = command(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path / place} is imported as")
    assert "rename it" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def distribution(site: Path) -> Path:
    """Write a distribution that installs a package named `recipes`; return its file."""
    (site / "recipes").mkdir(parents=True, exist_ok=True)
    file = site / "recipes" / "__init__.py"
    file.write_text("raise ModuleNotFoundError('this is not a package')\n")
    metadata = site / "torchtune-0.6.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtune\nVersion: 0.6.1\n")
    (metadata / "RECORD").write_text("recipes/__init__.py,,\ntorchtune-0.6.1.dist-info/RECORD,,\n")
    return file


def said_of(file: Path) -> str:
    return f"error: torchtune 0.6.1 installs a package named 'recipes' ({file}), which Python"


def test_a_distribution_that_comes_first_is_named(tmp_path):
    file = distribution(tmp_path)
    done = command(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said_of(file))
    assert len(done.stderr.splitlines()) == 1


def test_a_distribution_that_has_overwritten_ours_is_named(tmp_path):
    for room in ROOMS:
        shutil.copytree(TREE / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    file = distribution(tmp_path)
    done = command(tmp_path, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(said_of(file))
