# SPDX-License-Identifier: Apache-2.0
"""What whole runs share: how one is started, watched and killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TORCHRUN = Path(sys.executable).parent / "torchrun"
TIMEOUT_SECONDS = 300


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

    def start(self) -> subprocess.Popen:
        self.output = (self.folder / "output.log").open("a")
        return subprocess.Popen(
            [
                TORCHRUN, "--nproc-per-node", str(self.ranks), "-m", "tests.runs.train",
                json.dumps(self.options),
            ],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            start_new_session=True,
        )  # fmt: skip

    def finish(self) -> list[dict]:
        """Run to the end and return the steps."""
        process = self.start()
        code = process.wait(timeout=TIMEOUT_SECONDS)
        assert code == 0, (self.folder / "output.log").read_text()[-4000:]
        return self.steps()

    def kill_after(self, step: int) -> None:
        """Start, and kill every process with SIGKILL once a step has been logged."""
        process = self.start()
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not any(line["step"] >= step for line in self.steps()):
            assert process.poll() is None, (self.folder / "output.log").read_text()[-4000:]
            assert time.monotonic() < deadline, f"step {step} was never reached"
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        _kill_ranks(self.folder)
        process.wait()


def _kill_ranks(folder: Path) -> None:
    """Kill the ranks, which torchrun puts in sessions of their own."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"tests.runs.train" in command and str(folder).encode() in command:
            os.kill(int(entry.name), signal.SIGKILL)


@pytest.fixture
def training_run(tmp_path, small_store):
    """Return a function that makes a run in a folder of the given name."""

    def make(name: str, **options) -> TrainingRun:
        return TrainingRun(tmp_path / name, small_store, **options)

    return make
