# SPDX-License-Identifier: Apache-2.0
"""The page of a DGX cluster is typed as it is, up to jobs that a real Slurm has accepted.

In a clone, with a small random model where the page imports the published one from. The nodes of
eight GPUs are the tests' sleeping ones; their partition is down, so that jobs wait in it.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.house.blocks import OF_USERS, blocks, typed
from tests.house.test_user_pages import LLAMA
from tests.recipes.hugging_face.support import models
from tests.slurm.support.real_slurm import GPU_PARTITION, TREE
from tests.warm_start import path_with

# test_chain runs such a chain to its end, test_scripts has the scripts of this cluster.
pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1200)]

PAGE = OF_USERS[0].read_text()
ACCOUNT = "research"
CHAIN = [
    "prepare", "llama_long_256k", "evaluate_llama_long_256k", "llama_long_512k",
    "evaluate_llama_long_512k", "export",
]  # fmt: skip


class Typed(NamedTuple):
    """The clone that the page was typed in, and what each block wrote."""

    clone: Path
    shown: dict[str, str]


@pytest.fixture(scope="module")
def page(slurm, tmp_path_factory) -> Iterator[Typed]:
    """Type the page; its jobs are cancelled at the end."""
    clone = tmp_path_factory.mktemp("shared") / "longhaul"
    subprocess.run(["git", "clone", "--quiet", "--shared", TREE, clone], check=True)
    (clone / ".venv").symlink_to(sys.prefix)
    models.folder(clone / "meta-llama" / "Llama-3.1-8B", **LLAMA)
    (clone / "books.jsonl").write_text('{"text": "a book"}\n')
    slurm.run("sacctmgr", "-i", "add", "account", ACCOUNT)
    slurm.run("sacctmgr", "-i", "add", "user", "root", f"account={ACCOUNT}")
    slurm.run("scontrol", "update", f"PartitionName={GPU_PARTITION}", "State=DOWN")
    variables = {**slurm.environment, "PYTHONPATH": path_with(clone)}
    shown = {}
    try:
        for block in blocks(PAGE):
            if not block.reason:
                code, said = typed(block, clone, variables)
                assert code == 0, f"{block.code}{said}"
                shown[block.code] = said
        yield Typed(clone, shown)
    finally:
        slurm.run("scancel", f"--account={ACCOUNT}")
        slurm.run("scontrol", "update", f"PartitionName={GPU_PARTITION}", "State=UP")


def shown_by(page: Typed, words: str) -> str:
    """Return what the only block that contains the words has written."""
    [said] = [said for code, said in page.shown.items() if words in code]
    return said


def test_slurm_has_the_chain_of_the_page_on_four_nodes_each(page, slurm):
    numbers = json.loads((page.clone / "runs" / "llama_long" / "launch" / "jobs.json").read_text())
    assert list(numbers) == CHAIN
    for name, number in numbers.items():
        job = slurm.job(int(number))
        assert (job["JobState"], job["Account"], job["Partition"]) == (
            "PENDING", ACCOUNT, GPU_PARTITION,
        )  # fmt: skip
        trains = name.startswith("llama")
        assert (job["NumNodes"] == "4-4") == trains, name
        assert not trains or job["TresPerNode"] == "gres:gpu:8", job


def test_the_scripts_are_those_of_the_page_s_cluster(page):
    said = shown_by(page, "--dryrun\n")
    assert re.findall("^# ---- (.*)$", said, re.MULTILINE) == CHAIN
    assert said.count("#SBATCH --partition=gpus") == len(CHAIN)
    assert said.count("#SBATCH --nodes=4") == 2


def test_status_shows_the_stages_as_queued(page):
    said = shown_by(page, "longhaul status")
    for stage in ("llama_long_256k", "llama_long_512k"):
        assert re.search(rf"{stage} .*queued", said), said


def test_the_defaults_of_the_page_are_told_with_their_file(page):
    said = shown_by(page, "longhaul config")
    for option, value in (
        ("cluster", "site.yaml"), ("account", ACCOUNT), ("partition", GPU_PARTITION),
    ):  # fmt: skip
        assert re.search(rf"--{option} +{value} +longhaul.toml", said), said
    assert "ok    everything a launch needs is set" in said


def test_the_runs_that_the_page_names_are_those_of_the_chain(page):
    named = set(re.findall(r"(?:runs|stages)/(\w+)|--stage (llama\w+)", PAGE))
    stages = json.loads((page.clone / "runs" / "llama_long" / "run.json").read_text())
    assert {run or stage for run, stage in named} == {"llama_long", "llama_long_512k"}
    assert "llama_long_512k" in str(stages)
