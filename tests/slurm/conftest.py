# SPDX-License-Identifier: Apache-2.0
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.support.packages import obstacle
from tests.slurm.support.real_slurm import RealSlurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[RealSlurm]:
    """Return a real Slurm of two nodes; skip where none can be started, which CI never does."""
    if why := obstacle():
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    with RealSlurm() as running:
        yield running


@pytest.fixture(autouse=True)
def _programs_of_this_environment(monkeypatch):
    """Put this environment's torchrun on PATH, as the command does."""
    programs = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join([programs, os.environ["PATH"]]))
