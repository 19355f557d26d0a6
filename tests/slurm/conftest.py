# SPDX-License-Identifier: Apache-2.0
import os
from collections.abc import Iterator

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
