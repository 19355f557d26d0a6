# SPDX-License-Identifier: Apache-2.0
"""A ladder as a chain of jobs on a real Slurm, and what may happen to it there."""

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
FIRST, SECOND = "tiny_own_512", "tiny_own_2k"
STEPS = 8
"""Steps of each stage of the whole chain: one is told to stop after its second and has to hear it
before its last."""
ENDLESS = 100_000
"""Steps of a stage that no machine takes before the chain is cancelled, and an index holds."""


class Chain:
    """One chain that was submitted from a clone of the tree."""

    def __init__(
        self, slurm, folder: Path, *words: str, steps: int, store: Path, suites: str = ""
    ) -> None:
        self.slurm, self.folder, self.run = slurm, folder, folder / "run"
        (folder / "site.yaml").write_text(yaml.safe_dump(_site()))
        subprocess.run(["git", "clone", "--quiet", "--shared", TREE, folder / "tree"], check=True)
        self.given = (
            "--ladder", short_ladder(folder, suites), "--store", store,
            f"trainer.max_steps={steps}", f"trainer.val_check_interval={steps}",
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


def short_ladder(folder: Path, suites: str = "") -> Path:
    """Write a ladder of the tiny model with two stages of few tokens; return the file.

    `suites` runs a task after each stage, with this threshold.
    """
    file = folder / "own.py"
    gates = f"suites=(SuiteThreshold(task='words_choice', {suites}),)" if suites else ""
    runs = f"SuiteRun(tasks=('words_choice',), include={str(TASKS)!r})," if suites else ""
    file.write_text(
        "from dataclasses import replace\n"
        "from custom_modules.rope.config import RopeScaling\n"
        "from recipes.ladders.tiny import TINY_LADDER\n"
        "from recipes.spec.gate import Gate, SuiteThreshold\n"
        "from recipes.spec.suites import SuiteRun\n"
        "first, second = (\n"
        f"    replace(stage, tokens=10 * 2048, tokens_per_batch=2048, gate=Gate({gates}))\n"
        "    for stage in TINY_LADDER.stages[:2]\n"
        ")\n"
        "yarn = RopeScaling.yarn(base=10_000, factor=4.0, original_length=512)\n"
        f"LADDER = replace(TINY_LADDER, name='own', suites=({runs}),\n"
        "                 stages=(first, replace(second, rope=yarn)))\n"
    )
    return file


def _site() -> dict:
    """Return a cluster file of the tests' Slurm: no container, this environment on every node."""
    slurm = {
        "account": ACCOUNT, "partition": PARTITION, "time": "00:30:00", "save_seconds": 15,
        "ask_for_gpus": "none", "exclusive": False, "mem": None,
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
    chain.until_step(SECOND, 2)
    slurm.signal(chain.number(SECOND), "TERM")
    chain.wait("export", timeout_seconds=2 * LONG)
    return chain


def test_the_ladder_runs_to_an_exported_model_with_every_gate_passed(whole, slurm):
    for name in whole.jobs:
        assert whole.wait(name) == "COMPLETED", slurm.log(whole.number(name))
    assert list(whole.jobs) == [
        "prepare", FIRST, f"evaluate_{FIRST}", SECOND, f"evaluate_{SECOND}", "export",
    ]  # fmt: skip
    for stage in (FIRST, SECOND):
        kept = json.loads((whole.run / "eval" / f"{stage}.gate.json").read_text())
        assert kept["open"], kept
    page = json.loads((whole.run / "preflight.json").read_text())
    assert page
    config = json.loads((whole.run.parent / "exported" / "config.json").read_text())
    assert config["rope_scaling"]["rope_type"] == "yarn"


@pytest.mark.nightly
def test_a_stage_that_was_told_to_stop_ends_as_one_that_was_not(whole, slurm, tmp_path):
    assert slurm.restarts(whole.number(SECOND)) == 1
    here = whole.run / "stages" / SECOND
    config = tmp_path / "stages" / SECOND / "config.yaml"
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
    stopped = whole.steps(SECOND)
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


@pytest.mark.nightly
def test_a_shut_gate_ends_the_chain_and_says_why(slurm, whole, store, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    chain = Chain(slurm, tmp_path, "--gate", "passkey=1", steps=2, store=store, suites="least=2")
    stage, evaluate, suites = FIRST, f"evaluate_{FIRST}", f"suites_{FIRST}"
    assert chain.wait(evaluate) == "FAILED"
    assert chain.wait(suites).startswith("CANCELLED")
    assert chain.wait(SECOND).startswith("CANCELLED")
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


@pytest.mark.nightly
def test_a_stage_outlives_its_time_limit_and_a_lost_node(slurm, whole, store, tmp_path):
    chain = Chain(slurm, tmp_path, steps=ENDLESS, store=store)
    number = chain.number(FIRST)
    try:
        chain.until_step(FIRST, 5)
        slurm.limit_soon(number)
        end = time.monotonic() + LONG
        while slurm.restarts(number) < 1:  # by itself, before the limit
            assert time.monotonic() < end, slurm.log(number)
            time.sleep(1)
        slurm.run("scontrol", "update", f"JobId={number}", "TimeLimit=30")
        before = chain.steps(FIRST)[-1]["step"]
        chain.until_step(FIRST, before + 3)
        slurm.kill_node("n2")
        while slurm.restarts(number) < 2:
            assert time.monotonic() < end, slurm.log(number)
            time.sleep(1)
        lost_at = chain.steps(FIRST)[-1]["step"]
        slurm.start_node("n2")
        chain.until_step(FIRST, lost_at + 3)  # how one that was queued again ends: `whole`
        steps = [one["step"] for one in chain.steps(FIRST)]
    finally:
        chain.cancel()
    assert steps == list(range(1, len(steps) + 1))
