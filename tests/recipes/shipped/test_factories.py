# SPDX-License-Identifier: Apache-2.0
"""NeMo's own command lists, overrides, checks and exports the shipped recipes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.resolved import yaml_file
from recipes.shipped.table import ROWS
from tests.warm_start import MORE, path_with

pytestmark = pytest.mark.slow

TREE = Path(__file__).resolve().parents[3]
CALLS = """
import json, sys
sys.argv = ["nemo", "llm"]
from nemo_run.__main__ import app
from typer.testing import CliRunner
for words in json.load(sys.stdin):
    result = CliRunner().invoke(app, ["llm", "pretrain", *words])
    print(json.dumps([result.exit_code, result.output]))
"""


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    """Return exit code and output of each call of `nemo llm pretrain`, all made in one process.

    Nothing but the entry point that pyproject.toml declares tells nemo-run of the recipes.
    """
    if sys.version_info < (3, 11):
        pytest.skip("the standard library reads TOML from Python 3.11 on")
    import tomllib

    folder = tmp_path_factory.mktemp("site")
    declared = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    about = folder / "longhaul_recipes-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Name: {declared['name']}\nVersion: 0.1.0\n")
    points = [
        f"{name} = {value}" for name, value in declared["entry-points"]["nemo_run.cli"].items()
    ]
    (about / "entry_points.txt").write_text("\n".join(["[nemo_run.cli]", *points]))
    calls = {
        "help": ["--help"],
        "dry": ["--factory", "tiny_512", "--dryrun", "trainer.max_steps=2"],
        "phantom": ["--factory", "tiny_512", "--dryrun", "trainer.strategy.contxt_parallel_size=2"],
        "unknown": ["--factory", "tiny_512", "--dryrun", "model.config.kv_chanels=2"],
        "unread": ["--factory", "llama3_8b_prolong_64k", "--dryrun", "data.seq_length=128"],
        "export": [
            "--factory", "llama3_8b_prolong_64k(nodes=8)", "--to-yaml", str(folder / "a.yaml"),
            "trainer.max_steps=20", "model.config.tiling.loss_tile=8K",
        ],
        "other": ["--factory", "llama3_8b", "--dryrun", "trainer.max_steps=20"],
    }  # fmt: skip
    (folder / "calls.py").write_text(CALLS)
    done = subprocess.run(
        [sys.executable, folder / "calls.py"],
        input=json.dumps(list(calls.values())), text=True, check=True, cwd=folder,
        stdout=subprocess.PIPE,
        env={**os.environ, **MORE, "PYTHONPATH": f"{folder}:{path_with(TREE)}", "COLUMNS": "200"},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    return dict(zip(calls, map(json.loads, lines[-len(calls) :]), strict=True)) | {"at": folder}


def test_the_help_lists_every_shipped_recipe(called):
    code, output = called["help"]
    assert code == 0
    assert [name for name in ROWS if f" {name} " not in output] == []


def test_a_recipe_is_shown_with_its_overrides(called):
    code, output = called["dry"]
    assert code == 0
    assert "max_steps=2," in output
    assert "val_check_interval=2," in output  # as `longhaul pretrain` sets it


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("phantom", "contxt_parallel_size is not a parameter of CpuStrategy; did you mean context"),
        ("unknown", "the recipe has no model.config.kv_chanels; did you mean"),
        ("unread", "model.config.seq_length is 65,536 but the data module gives 128"),
    ],
)
def test_what_longhaul_refuses_is_refused(called, call, said):
    code, output = called[call]
    assert code == 1
    assert said in output


def test_a_recipe_is_exported(called):
    code, output = called["export"]
    assert code == 0, output
    recipe = yaml_file.read(called["at"] / "a.yaml")  # as `longhaul pretrain --yaml` does
    assert (recipe.trainer.max_steps, recipe.trainer.num_nodes) == (20, 8)
    assert recipe.model.config.tiling.loss_tile == 8192


def test_a_recipe_of_nemo_s_own_is_left_to_nemo_run(called):
    code, output = called["other"]
    assert code == 0
    assert "max_steps=20" in output
