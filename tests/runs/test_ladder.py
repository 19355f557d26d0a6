# SPDX-License-Identifier: Apache-2.0
"""The whole ladder by one command: every stage from the last one, resumable, to the report."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longhaul.run_folder.lock import InUseError, require_unused
from recipes.ladders import TINY_LADDER
from tests.ranks import kill_tree
from tests.warm_start import cold

# The command starts twice, torchrun five times: 200 s alone, three times that on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LONGHAUL = Path(sys.executable).parent / "longhaul"
STAGES = ("tiny_512", "tiny_2k", "tiny_8k")
STEPS = 3
PLANTED = {name: f"planted-{name.lower()}" for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_PASSWORD")}
"""Secrets of the user's environment."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_store):
    """Return the folder of a short run of the tiny ladder, killed once in its second stage.

    Blanks and an umlaut are in every path, and in the working folder lie files of the user's own
    that have the names of our packages.
    """
    folder = tmp_path_factory.mktemp("the ladder of Jürgen")
    run, store = folder / "a run", folder / "a store"
    shutil.copytree(small_store, store)
    for name in ("data.py", "eval.py", "recipes/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("raise SystemExit('a file of the user was imported')\n")
    environment = os.environ | PLANTED
    command = [
        LONGHAUL, "run", "--ladder", "tiny", "--executor", "local",
        "--out", run, "--store", store, "--debug-comm",
        f"trainer.max_steps={STEPS}", "trainer.val_check_interval=3",
    ]  # fmt: skip
    first = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, cwd=folder, env=environment
    )
    deadline = time.monotonic() + 600
    try:
        while not _steps(run, "tiny_2k"):
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with pytest.raises(InUseError):  # so `longhaul evaluate` is refused meanwhile
            require_unused(run / "eval")
    finally:
        kill_tree(first.pid)
        first.wait()
    before = (run / "stages" / "tiny_512" / "metrics.jsonl").read_text()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (run / "stages" / "tiny_512" / "metrics.jsonl").read_text() == before
    return run, done


def _steps(run: Path, stage: str) -> list[dict]:
    path = run / "stages" / stage / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_no_secret_of_the_environment_is_in_the_run_folder_or_on_the_terminal(finished):
    run, done = finished
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 50
    texts = [done.stdout.encode(), done.stderr.encode(), *(path.read_bytes() for path in files)]
    assert [value for value in PLANTED.values() for text in texts if value.encode() in text] == []


def test_every_stage_ran_to_its_end_at_its_own_learning_rate(finished):
    run, _ = finished
    for name, stage in zip(STAGES, TINY_LADDER.stages, strict=True):
        steps = _steps(run, name)
        assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
        warmup = stage.lr.warmup_steps(STEPS)
        assert steps[0]["lr"] == pytest.approx(stage.lr.peak / (warmup + 1))
        assert all(step["tokens"] == stage.tokens_per_batch for step in steps)


def test_a_later_stage_starts_from_the_weights_of_the_one_before(finished):
    run, _ = finished
    last = _steps(run, "tiny_512")[-1]["loss"]
    first = _steps(run, "tiny_2k")[0]["loss"]
    assert first < last + 0.2


def test_the_report_and_the_figures_by_range_come_out(finished):
    run, done = finished
    assert (run / "report.html").stat().st_size > 10_000
    assert "2K-8K" in done.stdout
    assert done.stdout.rstrip().endswith("report.html")


def test_the_console_shows_progress_and_none_of_the_libraries_warnings(finished):
    _, done = finished
    shown = done.stdout + done.stderr
    assert "tiny_8k  3/3" in shown
    assert "Warning" not in shown
    assert "[NeMo" not in shown


def test_a_finished_run_is_not_trained_again(finished):
    run, _ = finished
    before = (run / "stages" / "tiny_8k" / "metrics.jsonl").stat().st_mtime
    done = subprocess.run(
        [LONGHAUL, "run", "--ladder", "tiny", "--out", run, "--store", _store_of(run),
         f"trainer.max_steps={STEPS}"],
        capture_output=True, text=True, check=False, env=cold(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for noise in ("Warning", "[NeMo"):  # this command imports NeMo itself
        assert noise not in done.stdout + done.stderr
    assert (run / "stages" / "tiny_8k" / "metrics.jsonl").stat().st_mtime == before


def _store_of(run: Path) -> str:
    import yaml

    config = (run / "stages" / "tiny_512" / "config.yaml").read_text()
    return yaml.safe_load(config)["data"]["store"]
