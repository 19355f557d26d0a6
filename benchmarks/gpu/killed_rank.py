# SPDX-License-Identifier: Apache-2.0
"""A run of two ranks, one of which is killed, and its resume by the same command.

On a GPU both ranks take it, each as a node of its own (`benchmarks.harness.kept_ranks`); on a CPU
they join by gloo. Everything else is what two nodes run.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.sizes import Device, Sizes
from benchmarks.harness.kept_ranks import HOST_ID, ON_ONE_GPU
from benchmarks.harness.machine import TREE
from benchmarks.harness.processes import children_of, kill
from benchmarks.reliability.killed_run import write_store
from recipes.checkpoints.marker import newest_checkpoint, steps_taken

RUN_STEPS: dict[Device, tuple[int, int]] = {"cuda": (100, 20), "cpu": (9, 3)}
"""Steps of the run whose rank is killed, and after how many it saves."""
STAGE = "tiny_512"
RECIPE = "recipe.yaml"
TASK = f"from longhaul.jobs.watched_training import train_watched; train_watched({RECIPE!r})"
RUN_SECONDS: dict[Device, float] = {"cuda": 60.0, "cpu": 400.0}
"""Of each part of the run."""


def killed_run(sizes: Sizes) -> dict[str, Any]:
    """Return the losses of a run before a rank was killed and after the same command resumed it.

    Two agents of torchrun start a rank each, as on two nodes. The death is noticed when both have
    ended. Raises RuntimeError where the run does not.
    """
    start = time.perf_counter()
    steps, every = RUN_STEPS[sizes.device]
    with tempfile.TemporaryDirectory(prefix="a killed run ") as name:
        folder = Path(name)
        stage = folder / "run" / "stages" / STAGE
        _write_recipe(sizes, folder, steps, every)
        with _Agents(sizes.device, folder) as agents:
            agents.wait(until=lambda: newest_checkpoint(stage / "checkpoints") is not None)
            agents.kill_last_rank()
            killed = time.perf_counter()
            codes = agents.wait()
            noticed = time.perf_counter()
        taken, before = steps_taken(stage / "checkpoints"), _losses(stage)
        with _Agents(sizes.device, folder) as agents:
            agents.wait()
        after = _losses(stage)
        if 0 in codes or max(after, default=0) != steps:
            raise RuntimeError(
                f"the agents of the killed rank ended with {codes}, and the resumed run at step "
                f"{max(after, default=0)} of {steps}: {agents.output()}"
            )
    ended = time.perf_counter()
    resumed = {step: loss for step, loss in after.items() if step > taken}
    parts = {
        "up to the kill": {"losses": before, "seconds": killed - start},
        "until the death is noticed": {"exit_codes": codes, "seconds": noticed - killed},
        "resumed": {"from_step": taken, "losses": resumed, "seconds": ended - noticed},
    }
    return {"parts": {name: {**part, "reason": ""} for name, part in parts.items()}}


def _write_recipe(sizes: Sizes, folder: Path, steps: int, every: int) -> None:
    """Write a store and the recipe of a stage on two nodes of one rank, by the command line."""
    on_cpu = sizes.device == "cpu"
    overrides = [
        f"trainer.max_steps={steps}", f"log.ckpt.every_n_train_steps={every}",
        "trainer.num_nodes=2", "trainer.devices=1", "trainer.limit_val_batches=0",
        "data.global_batch_size=4", "trainer.callbacks[0].tokens_per_batch=2048",
    ]  # fmt: skip
    if not on_cpu and find_spec("transformer_engine") is None:
        overrides.append("model.config.transformer_engine=False")
    command = [
        sys.executable, "-W", "ignore", "-m", "longhaul.cli", "pretrain", "--factory", STAGE,
        "--layout", "dp2 mb2" + " fp32 cpu" * on_cpu, "--out", str(folder / "run"),
        "--store", str(write_store(folder)), "--to-yaml", str(folder / RECIPE), *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"longhaul pretrain ended with {done.returncode}: {done.stderr[-500:]}")


def _losses(stage: Path) -> dict[int, float]:
    """Return the losses of the steps that are logged in whole lines."""
    text = (stage / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {line["step"]: line["loss"] for line in lines}


class _Agents:
    """Two of torchrun's agents with a rank each, as two nodes have them."""

    def __init__(self, device: Device, folder: Path) -> None:
        self._log = folder / "output.log"
        self._seconds = RUN_SECONDS[device]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._agents = []
        for node in range(2):
            variables = {HOST_ID: f"rank{node}", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
            path = {"PYTHONPATH": os.pathsep.join((str(TREE), os.environ.get("PYTHONPATH", "")))}
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
                "--nproc_per_node", "1", "--node_rank", str(node), "--master_addr", "127.0.0.1",
                "--master_port", str(port), "--no-python", sys.executable, "-c", TASK,
            ]  # fmt: skip
            environment = os.environ | ON_ONE_GPU | variables | path
            with self._log.open("ab") as log:
                agent = subprocess.Popen(
                    command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=log,
                )  # fmt: skip
            self._agents.append(agent)

    def __enter__(self) -> "_Agents":
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._agents:
            if agent.poll() is None:
                kill(children_of(agent.pid))
                agent.kill()
                agent.wait()

    def wait(self, until: Callable[[], bool] | None = None) -> list[int]:
        """Wait for the agents' ends and return their exit codes, or until something holds."""
        deadline = time.monotonic() + self._seconds
        while any(agent.poll() is None for agent in self._agents):
            if until is not None and until():
                return []
            if time.monotonic() > deadline:
                raise RuntimeError(f"not ended in {self._seconds:.0f} s: {self.output()}")
            time.sleep(0.05)
        if until is not None:
            raise RuntimeError(f"ended too early: {self.output()}")
        return [agent.returncode for agent in self._agents]

    def kill_last_rank(self) -> None:
        (rank,) = psutil.Process(self._agents[-1].pid).children()
        rank.kill()

    def output(self) -> str:
        return self._log.read_text(errors="replace")[-1000:]
