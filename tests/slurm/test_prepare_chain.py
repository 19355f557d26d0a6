# SPDX-License-Identifier: Apache-2.0
"""`longhaul run --prepare-jobs` on a real Slurm: a plan, an array with a killed job, a merge."""

import os
import signal
from pathlib import Path

import pytest

from data.prepare import prepare
from recipes.models import TINY
from tests.conditions import until
from tests.data.preparation.conftest import contents
from tests.slurm.support.processes import carrying
from tests.slurm.test_chain import LONG, Chain

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(2400)]


def rank_of_job(slurm, number: int) -> int | None:
    """Return the process of the rank of one job of an array, once it runs."""
    marker = f"SLURM_CONF={slurm.environment['SLURM_CONF']}"
    for process in carrying(marker, f"SLURM_ARRAY_TASK_ID={number}"):
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"python") and b"nemo_run.core.runners.fdl_runner" in words:
            return process
    return None


def test_the_store_of_a_chain_is_the_same_after_a_job_of_its_array_was_killed(slurm, tmp_path):
    store = tmp_path / "stores" / "tiny"
    chain = Chain(slurm, tmp_path, "--prepare-jobs", "2", steps=2, store=store)
    assert list(chain.jobs)[:3] == ["prepare_plan", "prepare_parts", "prepare"]
    try:
        assert chain.wait("prepare_plan") == "COMPLETED"
        rank = until(lambda: rank_of_job(slurm, 1), LONG)
        os.kill(rank, signal.SIGKILL)
        assert chain.wait("prepare") == "COMPLETED", slurm.log(chain.number("prepare"))
    finally:
        chain.cancel()
    job = f"{chain.number('prepare_parts')}_1"
    runs = slurm.run("sacct", "-D", "-X", "-n", "-P", "-o", "JobID", "-j", job).split()
    assert runs.count(job) >= 2
    alone = prepare(None, tmp_path / "alone", vocab_size=TINY.vocab)
    assert contents(store) == contents(alone.root)
