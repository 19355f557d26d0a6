# SPDX-License-Identifier: Apache-2.0
"""Commands that answer before anything large is loaded."""

import subprocess
import sys
from contextlib import nullcontext

import pytest

from longhaul.run_folder.lock import in_use
from tests.house.test_imports import HEAVY
from tests.longhaul.commands.test_run_on_slurm import site

COMMAND = """
import sys
from longhaul import cli
try:
    cli.main()
except SystemExit as ended:
    code = ended.code
heavy = sorted({heavy} & set(sys.modules))
sys.exit(f"brings {{heavy}}" if heavy else code)
"""


def after(*words: str) -> subprocess.CompletedProcess:
    """Run a command in a process of its own, which fails where a heavy module is there after it."""
    code = COMMAND.format(heavy=repr(HEAVY))
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("command", ["run", "pretrain"])
@pytest.mark.parametrize("fault", ["steps", "ranks", "out", "store", "used"])
def test_what_needs_no_nemo_is_refused_before_it_is_loaded(command, fault, tmp_path):
    file, run = tmp_path / "file", tmp_path / "run"
    file.touch()
    places = {"out": ("--out", file), "store": ("--store", file)}.get(fault, ())
    asked = {"steps": "steps=4000", "ranks": "steps=1 ranks=9"}.get(fault)
    said = {
        "steps": "steps; expected steps from 1 to ", "ranks": "there is no rank 9",
        "out": f"--out {file} is a file", "store": f"{file} is a file; expected the folder of a",
        "used": f"{run}/stages/tiny_512 is in use by process",
    }[fault]  # fmt: skip
    of_all = ("--factory", "tiny_512") if command == "pretrain" else ("--ladder", "tiny")
    words = (*of_all, *places, *(("--profile", asked) if asked else ()))
    words += () if fault == "out" else ("--out", run)
    new = tmp_path / "store"
    words += ("--store", new) if command == "run" and fault != "store" else ()
    if command == "pretrain" and fault in ("steps", "ranks"):
        words += ("data.store=elsewhere",)
    with in_use(run / "stages" / "tiny_512") if fault == "used" else nullcontext():
        done = after(command, *map(str, words))
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert not new.exists()


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("recipes",),
        ("recipes", "--json"),
        ("show", "tiny_8k"),
        ("show", "llama31_8b_nemo_64k", "--json"),
        ("batch", "--seq", "64K", "--tokens-per-batch", "4M", "--dp", "8"),
    ],
    ids=" ".join,
)
def test_a_light_command_loads_nothing_heavy(words):
    done = after(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("recipes", "nowhere"),
        ("show", "tiny_9k"),
        ("pretrain", "--factory", "tiny_9k"),
        ("pretrain", "--card", "tinny", "--ladder", "tiny"),
        ("pretrain", "--card", "tiny", "--ladder", "tiny", "--stage", "64X"),
        ("prepare", "--source", "nowhere", "--out", "store"),
        ("adopt", "nowhere", "--tokenizer", "none", "--out", "store"),
        ("data", "inspect", "nowhere"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_answered_before_anything_heavy_is_loaded(words):
    assert after(*words).returncode == 2


def test_a_folder_outside_git_is_refused_before_anything_heavy_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = ("run", "--ladder", "tiny", "--executor", "slurm", "--nodes", "2", "--device", "cpu")
    done = after(*run, "--cluster", str(site(tmp_path)))
    assert done.returncode == 2
    assert f"git refuses {tmp_path}" in done.stderr


def test_a_heavy_module_is_noticed():
    done = after("rope", "--card", "tiny", "--method", "linear:factor=4")
    assert "brings ['torch'" in done.stderr
