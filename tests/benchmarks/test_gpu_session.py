# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu` on a CPU at its small size: every case, and going on."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.gpu.__main__ import RENTAL
from benchmarks.gpu.cases import ON_CPU_SECONDS, all_cases
from benchmarks.gpu.results import MARK, Results
from benchmarks.gpu.session import PAGE_SECONDS, START_SECONDS
from benchmarks.gpu.sizes import ON_CPU
from benchmarks.harness.machine import version
from tests.house.rooms import TREE

COMMAND = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
ONLY_ON_GPUS = {
    "tensorwise": "ValueError: fp8 tensorwise does not compute on cpu; leave fp8 out, or run on",
    "delayed": "ValueError: fp8 delayed does not compute on cpu; leave fp8 out, or run on GPUs",
    "blockwise": "ValueError: fp8 blockwise does not compute on cpu; leave fp8 out, or run on GPUs",
    "tile-loss adam-on-host:0.5": "ValueError: layout optimizer_offload is 0.5 on cpu",
}
LEAST = PAGE_SECONDS + ON_CPU_SECONDS + START_SECONDS["cpu"]


def run(*words):
    command = [*COMMAND, *map(str, words)]
    return subprocess.run(
        command, cwd=TREE, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return the folder of a session of all cases, and what it said."""
    folder = tmp_path_factory.mktemp("all of it") / "a folder"
    done = run("all", "--device", "cpu", "--seconds", 3000, "--out", folder)
    assert done.returncode == 0, done.stderr + (folder / "worker.log").read_text()
    return folder, done.stdout


def expected_reason(case) -> str:
    words = (case.settings.get("precision"), case.settings.get("layout"))
    return next((ONLY_ON_GPUS[word] for word in words if word in ONLY_ON_GPUS), "")


@pytest.mark.slow
@pytest.mark.nightly
def test_every_case_runs_or_says_what_it_lacks(measured):
    folder, said = measured
    found = Results(folder).read()
    for case in all_cases(ON_CPU):
        one = found[case.name]
        reason = expected_reason(case)
        assert one.reason.startswith(reason) if reason else one.reason == "", case.name
        assert bool(one.figures) != bool(one.reason)
        assert one.rental == json.loads((folder / RENTAL).read_text())["id"]
    stacks = found["stack_ALST_256"].figures["ways"]["ALST-like"]
    assert bool(stacks["reason"]) == (version("deepspeed") is None)
    assert f"{folder / 'page.md'}: " in said


@pytest.mark.slow
@pytest.mark.nightly
def test_the_page_has_every_kind_and_says_that_a_cpu_means_nothing(measured):
    page = (measured[0] / "page.md").read_text()
    assert "these figures mean nothing" in page
    for title in (
        "Goals", "Loss head", "MLP", "Attention of one rank of 4", "Steps by stack",
        "Whole training steps", "Several ranks on one GPU", "Parity in float64 over ranks",
        "Kernels", "A run from an import to an export", "A rank killed", "The device",
        "Not measured",
    ):  # fmt: skip
        assert f"## {title}\n" in page
    assert "another model" not in page
    assert "other results" not in page


@pytest.mark.slow
@pytest.mark.nightly
def test_the_planner_s_bytes_are_beside_the_measured_ones(measured):
    found = [one for one in Results(measured[0]).read().values() if one.kind == "step"]
    figures = [one.figures for one in found if one.counts]
    assert len(figures) > 5
    for one in figures:
        assert one["finite"]
        assert one["predicted"]["peak_bytes"] == pytest.approx(one["peak_bytes"], rel=0.1)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_second_session_has_nothing_to_do_but_what_failed_if_asked(measured):
    folder, _ = measured
    before = Results(folder).read()
    done = run("all", "--device", "cpu", "--seconds", 3000, "--out", folder)
    assert done.returncode == 0
    assert done.stdout.startswith("all ")
    done = run("step", "--again", "--device", "cpu", "--seconds", 3000, "--out", folder)
    assert done.returncode == 0, done.stderr
    after = Results(folder).read()
    assert after.keys() == before.keys()
    assert {name for name in after if after[name].counts} == {
        name for name in before if before[name].counts
    }


@pytest.mark.slow
@pytest.mark.nightly
def test_a_clock_that_runs_out_leaves_the_rest_to_the_next_call(tmp_path):
    words = ["mlp", "--device", "cpu", "--out", tmp_path / "a folder"]
    done = run(*words, "--seconds", LEAST)
    assert done.returncode == 1
    assert "s are left, and the first result takes 10; give more --seconds" in done.stderr
    cases = [case.name for case in all_cases(ON_CPU) if case.kind == "stack"]
    words[0] = "stack"
    done = run(*words, "--seconds", LEAST + 20)
    first = Results(tmp_path / "a folder").read()
    assert done.returncode == 0, done.stderr
    assert 0 < len(first) < len(cases)
    done = run(*words, "--seconds", 600)
    assert done.returncode == 0, done.stderr
    second = Results(tmp_path / "a folder").read()
    assert list(second) == cases
    assert all(second[name] == one for name, one in first.items())


@pytest.mark.slow
@pytest.mark.nightly
def test_a_case_that_ends_its_process_costs_no_other(tmp_path):
    stacks = [case for case in all_cases(ON_CPU) if case.kind == "stack"]
    command = [*COMMAND, "stack", "--device", "cpu", "--seconds", "600", "--out", str(tmp_path)]
    with subprocess.Popen(command, cwd=TREE, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as session:
        mark = tmp_path / MARK
        while not mark.exists():
            assert session.poll() is None
            time.sleep(0.05)
        os.kill(json.loads(mark.read_text())["process"], signal.SIGKILL)
    found = Results(tmp_path).read()
    assert found[stacks[0].name].reason.startswith("its process ended with -9")
    assert all(found[case.name].counts for case in stacks[1:])


def test_a_folder_of_another_machine_is_refused(tmp_path):
    (tmp_path / RENTAL).write_text(json.dumps({"id": "a", "machine": "A", "canary": {}}))
    done = run("mlp", "--device", "cpu", "--out", tmp_path)
    assert done.returncode == 1
    assert "rental.json is of another machine (A); this one is" in done.stderr
    assert not (tmp_path / "results.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["all", "--seconds", "0", "--device", "cpu"], "--seconds 0; it must be above 0"),
        (["steps"], "choose from"),
        (["all"], "error: --device cuda: PyTorch finds no GPU here; `--device cpu` runs"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_measured(words, said, tmp_path):
    import torch

    if words == ["all"] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(*words, "--out", tmp_path / "none")
    assert done.returncode == (1 if words == ["all"] else 2)
    assert said in done.stderr
    assert not (tmp_path / "none").exists()
