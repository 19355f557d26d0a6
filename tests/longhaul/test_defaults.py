# SPDX-License-Identifier: Apache-2.0
"""`longhaul.toml`: defaults of options in the working folder and in the user's configuration."""

import json
from pathlib import Path

import pytest

from longhaul import defaults
from recipes.ladders import LADDERS
from recipes.models import CARDS
from tests.longhaul.commands.test_run_on_slurm import site, tree  # noqa: F401

CARD, LADDER = CARDS["llama31_8b"], LADDERS["nemo"]


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """Return the user's file, which does not exist yet, beside an empty working folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    path = tmp_path / "config" / "longhaul" / "longhaul.toml"
    path.parent.mkdir(parents=True)
    return path


def here(text: str) -> None:
    Path("longhaul.toml").write_text(text)


def test_an_option_wins_over_the_working_folder_and_that_over_the_user_s_file(own):
    own.write_text('cluster = "dgx_a100"\naccount = "long"\n')
    assert defaults.default("cluster") == "dgx_a100"
    here('cluster = "dgx_b200"\n')
    assert defaults.default("cluster") == "dgx_b200"
    assert defaults.default("cluster", "gb200_nvl72") == "gb200_nvl72"
    assert defaults.default("account") == "long"
    assert defaults.default("partition") == ""
    own.write_text('cluster = "mine.yaml"\n')
    here("")
    assert defaults.default("cluster") == str(own.parent / "mine.yaml")


def test_folders_have_names_in_braces(own):
    here('store = "/lustre/{card}/store"\nout = "/lustre/runs/{name}"\n')
    assert defaults.store_of(CARD) == Path("/lustre/llama31_8b/store")
    assert defaults.run_of(CARD, LADDER) == Path("/lustre/runs/llama31_8b_nemo")
    assert defaults.run_of(CARD, LADDER, Path("mine")) == Path("mine")
    here("")
    assert defaults.run_of(CARD, LADDER) == Path("runs/llama31_8b_nemo")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cluster = dgx", "longhaul.toml is not TOML"),
        ('clustr = "dgx_h100"', "has no field 'clustr'; did you mean cluster"),
        ("cluster = 3", "cluster"),
        ('account = ""', "account is empty; give it a value, or leave it out"),
        ('out = "runs/{model}"', "out has {model}; it may have {card}, {ladder}, {name}"),
        ('store = "s/{name}"', "store has {name}; it may have {card}"),
        ('out = "runs/{name"', "out has {; it may have"),
    ],
)
def test_a_mistake_in_the_file_is_told_with_its_name(own, answer, text, said):
    here(text)
    told = answer("config").error()
    assert said in told
    assert "longhaul.toml" in told


def test_config_shows_what_holds_and_from_where(own, answer):
    here('cluster = "dgx_b200"\n')
    own.write_text('account = "long"\n')
    shown = answer("config").out
    assert "dgx_b200" in shown
    assert "longhaul.toml" in shown
    assert "stores/{card}" in shown
    found = json.loads(answer("config", "--json").out)
    assert found["defaults"]["account"] == {"value": "long", "file": str(own)}
    here("")
    own.unlink()
    assert "no defaults are set" in answer("config").err


def test_the_planner_and_the_commands_it_prints_take_the_cluster(own, answer):
    here('cluster = "dgx_b200"\n')
    assert "GPUs of dgx_b200" in answer("plan", "llama32_1b", "--seq", "64K").out
    assert "GPUs of dgx_a100" in answer(
        "plan", "llama32_1b", "--seq", "64K", "--cluster", "dgx_a100"
    ).out  # fmt: skip


def test_a_default_cluster_without_hardware_is_not_planned_for(own, answer, tmp_path):
    file = tmp_path / "site.yaml"
    file.write_text("name: site\nexecutor: slurm\n")
    here(f'cluster = "{file}"\n')
    assert defaults.planned_cluster() == ""
    assert "GPUs of dgx_h100" in answer("plan", "llama32_1b", "--seq", "64K").out
    asked = ("--card", "llama32_1b", "--ladder", "nemo", "--stage", "64K")
    assert answer("show", *asked).code == 0
    said = answer("plan", "llama32_1b", "--seq", "64K", "--cluster", file).error()
    assert "has no mapping `hardware`" in said


def test_jobs_take_cluster_account_and_folders(own, answer, tree, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tree)
    file = site(tree)
    here(f'cluster = "{file}"\naccount = "long"\npartition = "wide"\nout = "{tree}/all/{{name}}"\n')
    asked = ("pretrain", "--factory", "tiny_512", "--executor", "slurm", "--dryrun")
    code, out, err = answer(*asked)
    assert code == 0, err
    assert "#SBATCH --account=long" in out
    assert "#SBATCH --partition=wide" in out
    assert f"{tree}/all/tiny" in out
    names = [line.removeprefix("# ---- ") for line in out.splitlines() if "# ---- " in line]
    assert names == ["prepare", "tiny_512"]
    assert "#SBATCH --account=short" in answer(*asked, "--account", "short").out
