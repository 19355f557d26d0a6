# SPDX-License-Identifier: Apache-2.0
"""Commands that answer before anything large is loaded."""

import subprocess
import sys

import pytest

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


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("recipes",),
        ("recipes", "--json"),
        ("show", "tiny_8k"),
        ("show", "llama31_8b_nemo_64k", "--json"),
        ("batch", "--seq", "64K", "--tokens-per-batch", "4M", "--dp", "8"),
        ("sources", "longmino"),
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
        ("census", "nowhere"),
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
