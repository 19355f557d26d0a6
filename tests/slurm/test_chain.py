# SPDX-License-Identifier: Apache-2.0
"""The tiny ladder as a chain of jobs on a real Slurm, and what may happen to it there."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.slurm.support.real_slurm import ACCOUNT, ENDED, PARTITION, TREE
from tests.warm_start import path_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

TASKS = Path(__file__).parents[1] / "eval" / "harness" / "tasks"
LONG = 900
"""Seconds that a chain may take on two busy cores."""
STEPS = 8
"""Steps of each stage of the whole chain: one is told to stop after its second and has to hear it
before its last."""
ENDLESS = 100_000
"""Steps of a stage that no machine takes before the chain is cancelled, and an index holds."""


class Chain:
    """One chain that was submitted from a clone of the tree."""

    def __init__(
        self, slurm, folder: Path, *words: str, steps: int, store: Path, ladder: str = "tiny",
        **limits,
    ) -> None:  # fmt: skip
        self.slurm, self.folder, self.run = slurm, folder, folder / "run"
        (folder / "site.yaml").write_text(yaml.safe_dump(_site(**limits)))
        subprocess.run(["git", "clone", "--quiet", "--shared", TREE, folder / "tree"], check=True)
        self.given = (
            "--ladder", ladder, "--store", store, f"trainer.max_steps={steps}",
            f"trainer.val_check_interval={steps}",
        )  # fmt: skip
        self.submit(*words)

    def submit(self, *words: str) -> None:
        """Submit what is left of the ladder."""
        self.slurm.run(
            sys.executable, "-m", "longhaul.cli", "run", "--executor", "slurm", "--nodes", 2,
            "--cluster", self.folder / "site.yaml", "--device", "cpu", "--out", self.run, *words,
            *self.given,
            cwd=self.folder / "tree", variables={"PYTHONPATH": path_with(self.folder / "tree")},
        )  # fmt: skip
        self.jobs = json.loads((self.run / "launch" / "jobs.json").read_text())

    def number(self, name: str) -> int:
        return int(self.jobs[name])

    def wait(self, name: str, states=ENDED, timeout_seconds: int = LONG) -> str:
        found: str = self.slurm.wait(self.number(name), states, timeout_seconds)
        return found

    def until_step(self, stage: str, step: int, timeout_seconds: int = LONG) -> None:
        end = time.monotonic() + timeout_seconds
        while len(self.steps(stage)) < step:
            assert time.monotonic() < end, self.slurm.log(self.number(stage))
            time.sleep(0.5)

    def steps(self, stage: str) -> list[dict]:
        path = self.run / "stages" / stage / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def cancel(self) -> None:
        for number in self.jobs.values():
            self.slurm.cancel(int(number))


def _site(**limits) -> dict:
    """Return a cluster file of the tests' Slurm: no container, this environment on every node."""
    slurm = {
        "account": ACCOUNT, "partition": PARTITION, "time": "00:30:00", "save_seconds": 30,
        "ask_for_gpus": "none", "exclusive": False, "mem": None, **limits,
    }  # fmt: skip
    python = str(Path(sys.prefix))
    # Ranks share their cores with other tests: which is slow says nothing of a node.
    preflight = {"slow_warned": 50.0, "slow_failed": 100.0}
    return {
        "executor": "slurm", "slurm": slurm, "python": python, "preflight_seconds": 2,
        "preflight": preflight,
    }  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("stores") / "tiny"


@pytest.fixture(scope="module")
def whole(slurm, store, tmp_path_factory):
    """Return a chain that ended, its second stage told to stop on the way.

    Its clone, run folder and scripts have blanks and an umlaut in their paths.
    """
    folder = tmp_path_factory.mktemp("the chain of Jürgen")
    chain = Chain(slurm, folder, "--export", str(folder / "exported"), steps=STEPS, store=store)
    chain.until_step("tiny_2k", 2)
    slurm.signal(chain.number("tiny_2k"), "TERM")
    chain.wait("export", timeout_seconds=2 * LONG)
    return chain


def test_the_ladder_runs_to_an_exported_model_with_every_gate_passed(whole, slurm):
    for name in whole.jobs:
        assert whole.wait(name) == "COMPLETED", slurm.log(whole.number(name))
    assert list(whole.jobs) == [
        "prepare", "tiny_512", "evaluate_tiny_512", "tiny_2k", "evaluate_tiny_2k", "tiny_8k",
        "evaluate_tiny_8k", "export",
    ]  # fmt: skip
    for stage in ("tiny_512", "tiny_2k", "tiny_8k"):
        kept = json.loads((whole.run / "eval" / f"{stage}.gate.json").read_text())
        assert kept["open"], kept
    page = json.loads((whole.run / "preflight.json").read_text())
    assert page
    config = json.loads((whole.run.parent / "exported" / "config.json").read_text())
    assert config["rope_scaling"]["rope_type"] == "yarn"


@pytest.mark.nightly
def test_a_stage_that_was_told_to_stop_ends_as_one_that_was_not(whole, slurm, tmp_path):
    assert slurm.restarts(whole.number("tiny_2k")) == 1
    here = whole.run / "stages" / "tiny_2k"
    config = tmp_path / "stages" / "tiny_2k" / "config.yaml"
    config.parent.mkdir(parents=True)
    recipe = moved(
        yaml.safe_load((here / "config.yaml").read_text()), str(here), str(config.parent)
    )
    recipe["trainer"] |= {"num_nodes": 1, "devices": 2}
    config.write_text(yaml.safe_dump(recipe))
    train = f"from slurm.entrypoint import train; train({str(config)!r})"
    ranks = tmp_path / "ranks.py"
    ranks.write_text(f"if __name__ == '__main__':\n    {train}\n")
    subprocess.run(
        ["torchrun", "--nproc-per-node", "2", ranks],
        check=True, cwd=TREE, env=slurm_environment(slurm), timeout=LONG,
    )  # fmt: skip
    alone = [json.loads(line) for line in (config.parent / "metrics.jsonl").open()]
    stopped = whole.steps("tiny_2k")
    assert [one["step"] for one in stopped] == list(range(1, STEPS + 1))
    assert [one["samples"] for one in stopped] == [one["samples"] for one in alone]
    assert [one["loss"] for one in stopped] == [one["loss"] for one in alone]


def moved(node: Any, here: str, there: str) -> Any:
    """Return a recipe's tree with one folder in the place of another."""
    if isinstance(node, dict):
        return {key: moved(value, here, there) for key, value in node.items()}
    if isinstance(node, list):
        return [moved(value, here, there) for value in node]
    return node.replace(here, there) if isinstance(node, str) else node


def slurm_environment(slurm) -> dict[str, str]:
    """Return the tests' environment with ours first on the path."""
    return {
        **os.environ,
        **slurm.environment,
        "PYTHONPATH": path_with(TREE),
        "OMP_NUM_THREADS": "1",
    }


def with_suites(folder: Path) -> str:
    """Write the tiny ladder with a task, and a threshold that no share meets; return the file."""
    file = folder / "own.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from recipes.ladders.tiny import TINY_LADDER\n"
        "from recipes.spec.gate import Gate, SuiteThreshold\n"
        "from recipes.spec.suites import SuiteRun\n"
        "gate = Gate(suites=(SuiteThreshold(task='words_choice', least=2),))\n"
        "LADDER = replace(\n"
        "    TINY_LADDER,\n"
        "    name='own',\n"
        f"    suites=(SuiteRun(tasks=('words_choice',), include={str(TASKS)!r}),),\n"
        "    stages=tuple(replace(stage, gate=gate) for stage in TINY_LADDER.stages),\n"
        ")\n"
    )
    return str(file)


@pytest.mark.nightly
def test_a_shut_gate_ends_the_chain_and_says_why(slurm, whole, store, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    ladder = with_suites(tmp_path)
    chain = Chain(slurm, tmp_path, "--gate", "passkey=1", steps=2, store=store, ladder=ladder)
    stage, evaluate, suites = "tiny_own_512", "evaluate_tiny_own_512", "suites_tiny_own_512"
    assert chain.wait(evaluate) == "FAILED"
    assert chain.wait(suites).startswith("CANCELLED")
    assert chain.wait("tiny_own_2k").startswith("CANCELLED")
    kept = json.loads((chain.run / "eval" / f"{stage}.gate.json").read_text())
    assert not kept["open"]
    assert "of the passkeys found, at least 100% required" in slurm.log(chain.number(evaluate))
    assert slurm.restarts(chain.number(evaluate)) == 0

    chain.submit("--stage", "512")
    assert list(chain.jobs) == [evaluate, suites]
    assert chain.wait(suites) == "FAILED"
    assert chain.wait(evaluate) == "COMPLETED"
    assert slurm.restarts(chain.number(suites)) == 0
    assert "at least 2 required: not met" in slurm.log(chain.number(suites))
    judged = json.loads((chain.run / "eval" / f"{stage}.suites.gate.json").read_text())
    [result] = (chain.run / "eval" / "suites" / stage).glob("*.json")
    score = json.loads(result.read_text())["metrics"][0]["value"]
    assert (judged["open"], judged["judgements"][0]["measured"]) == (False, score)


def test_a_stage_outlives_its_time_limit_and_a_lost_node(slurm, whole, store, tmp_path):
    chain = Chain(slurm, tmp_path, steps=ENDLESS, store=store, time="00:02:00", save_seconds=15)
    stage, number = "tiny_512", chain.number("tiny_512")
    try:
        chain.until_step(stage, 5)
        end = time.monotonic() + LONG
        while slurm.restarts(number) < 1:  # by itself, before the limit
            assert time.monotonic() < end, slurm.log(number)
            time.sleep(1)
        before = chain.steps(stage)[-1]["step"]
        chain.until_step(stage, before + 3)
        slurm.kill_node("n2")
        while slurm.restarts(number) < 2:
            assert time.monotonic() < end, slurm.log(number)
            time.sleep(1)
        lost_at = chain.steps(stage)[-1]["step"]
        slurm.start_node("n2")
        chain.until_step(stage, lost_at + 3)  # how one that was queued again ends: `whole`
        steps = [one["step"] for one in chain.steps(stage)]
    finally:
        chain.cancel()
    assert steps == list(range(1, len(steps) + 1))
