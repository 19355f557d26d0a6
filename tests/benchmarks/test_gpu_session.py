# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu all` on a CPU at its small size: every case, and going on."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.gpu.cases import all_cases
from benchmarks.gpu.results import FILES, MARK
from benchmarks.gpu.sizes import ON_CPU
from benchmarks.harness.machine import version
from tests.house.rooms import TREE

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

COMMAND = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
NOT_INSTALLED = "RuntimeError: not installed: pip install -e '.[bench]'"
NOT_ON_CPU = "ValueError: fp8 tensorwise does not compute on cpu; leave fp8 out, or run on GPUs"


def run(*words):
    command = [*COMMAND, *map(str, words)]
    return subprocess.run(
        command, cwd=TREE, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return the folder of a session of all cases, and what it said."""
    folder = tmp_path_factory.mktemp("all of it") / "a folder"
    done = run("all", "--device", "cpu", "--minutes", 30, "--out", folder)
    assert done.returncode == 0, done.stderr + (folder / "worker.log").read_text()
    return folder, done.stdout


def expected_reason(case) -> str:
    if case.settings.get("precision") == "fp8":
        return NOT_ON_CPU
    if case.settings.get("way") == "ALST-like" and version("deepspeed") is None:
        return NOT_INSTALLED
    return ""


def test_every_case_runs_or_says_what_it_lacks(measured):
    folder, _ = measured
    for case in all_cases(ON_CPU):
        found = json.loads((folder / FILES / f"{case.name}.json").read_text())
        assert found["reason"] == expected_reason(case), case.name
        assert bool(found["figures"]) != bool(found["reason"])


def test_the_page_has_every_kind_and_says_that_a_cpu_means_nothing(measured):
    folder, said = measured
    page = (folder / "page.md").read_text()
    assert "these figures mean nothing" in page
    for title in (
        "Goals", "Host memory", "Loss head", "MLP", "Attention of one rank of 4", "Steps by stack",
        "The longest step that fits", "Whole training steps",
        "A run that offloads, validates and saves", "Not measured",
    ):  # fmt: skip
        assert f"## {title}\n" in page
    assert "another model" not in page
    assert f"{folder / 'page.md'}: " in said


def test_the_planner_s_bytes_are_beside_the_measured_ones(measured):
    folder, _ = measured
    steps = [json.loads(path.read_text()) for path in (folder / FILES).glob("step_*.json")]
    figures = [one["figures"] for one in steps if not one["reason"]]
    assert len(figures) > 5
    for one in figures:
        assert one["finite"]
        assert one["predicted"]["peak_bytes"] == pytest.approx(one["peak_bytes"], rel=0.1)


def test_a_second_session_has_nothing_to_do_but_what_failed_if_asked(measured):
    folder, _ = measured
    files = {path.name: path.stat().st_mtime_ns for path in (folder / FILES).glob("*.json")}
    done = run("all", "--device", "cpu", "--minutes", 30, "--out", folder)
    assert done.returncode == 0
    assert {p.name: p.stat().st_mtime_ns for p in (folder / FILES).glob("*.json")} == files
    done = run("step", "--again", "--device", "cpu", "--minutes", 30, "--out", folder)
    assert done.returncode == 0
    after = {p.name: p.stat().st_mtime_ns for p in (folder / FILES).glob("*.json")}
    assert after.keys() == files.keys()
    new = {name for name, written in after.items() if written > files[name]}
    fp8 = {f"{c.name}.json" for c in all_cases(ON_CPU) if c.settings.get("precision") == "fp8"}
    assert new == fp8


def test_a_case_that_ends_its_process_costs_no_other(tmp_path):
    longest = [case for case in all_cases(ON_CPU) if case.kind == "longest"]
    command = [*COMMAND, "longest", "--device", "cpu", "--minutes", "30", "--out", str(tmp_path)]
    with subprocess.Popen(command, cwd=TREE, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as session:
        mark = tmp_path / FILES / f"{longest[0].name}{MARK}"
        while not mark.exists():
            assert session.poll() is None
            time.sleep(0.05)
        os.kill(int(mark.read_text()), signal.SIGKILL)
    found = [json.loads((tmp_path / FILES / f"{c.name}.json").read_text()) for c in longest]
    assert found[0]["reason"].startswith("its process ended with -9")
    assert [one["reason"] for one in found[1:]] == [expected_reason(case) for case in longest[1:]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["all", "--minutes", "0", "--device", "cpu"], "--minutes 0; it must be above 0"),
        (["steps"], "choose from"),
        (["all"], "--device cuda: PyTorch finds no GPU here; `--device cpu` runs"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_measured(words, said, tmp_path):
    import torch

    if words == ["all"] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(*words, "--out", tmp_path / "none")
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "none").exists()
