# SPDX-License-Identifier: Apache-2.0
"""What whole runs share: how one is started, watched and killed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import TREE, Ranks, Server
from tests.runs.train import train_on_forked_rank

TORCHRUN = Path(sys.executable).parent / "torchrun"
TIMEOUT_SECONDS = 500
NEMO = Server("recipes.pretrain", "nemo_run")


def torchrun(ranks: int, module: str, *words: object) -> None:
    """Run a module to its end on ranks that torchrun starts."""
    done = subprocess.run(
        [TORCHRUN, "--nproc-per-node", str(ranks), "-m", module, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=TREE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


class TrainingRun:
    """A run of `tests.runs.train` in a folder of its own."""

    def __init__(self, folder: Path, store: Path, **options) -> None:
        self.folder = folder
        self.ranks = options.pop("ranks")
        self.options = {"run": str(folder), "store": str(store), **options}
        folder.mkdir(exist_ok=True)

    @property
    def metrics(self) -> Path:
        return self.folder / "stages" / "tiny_512" / "metrics.jsonl"

    def steps(self) -> list[dict]:
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def start(self) -> Ranks:
        output = str(self.folder / "output.log")
        return Ranks(train_on_forked_rank, self.ranks, self.options, output, server=NEMO)

    def finish(self) -> list[dict]:
        """Run to the end and return the steps."""
        with self.start() as ranks:
            ranks.results(TIMEOUT_SECONDS)
        return self.steps()

    def finish_under_torchrun(self) -> list[dict]:
        """Run to the end on ranks that torchrun starts, and return the steps."""
        torchrun(self.ranks, "tests.runs.train", json.dumps(self.options))
        return self.steps()

    def kill_after(self, step: int) -> None:
        """Start, and kill every rank with SIGKILL once a step and a checkpoint are there."""
        with self.start() as ranks:
            deadline = time.monotonic() + TIMEOUT_SECONDS
            saved = self.metrics.parent / "checkpoints"
            while not (any(n["step"] >= step for n in self.steps()) and [*saved.glob("step=*")]):
                assert ranks.running(), (self.folder / "output.log").read_text()[-4000:]
                assert time.monotonic() < deadline, f"step {step} or a save was not reached"
                time.sleep(0.05)


@pytest.fixture
def training_run(tmp_path, small_store):
    """Return a function that makes a run in a folder of the given name."""

    def make(name: str, **options) -> TrainingRun:
        return TrainingRun(tmp_path / name, small_store, **options)

    return make
