# SPDX-License-Identifier: Apache-2.0
"""The commands that pages tell a user to type next are accepted when they are typed."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from longhaul import show
from longhaul.cli import COMMANDS, loaded
from longhaul.next_commands import YOUR_CLUSTER, OnCluster
from recipes import cluster
from recipes.collection import ROWS
from recipes.ladders import LADDERS
from recipes.models import CARDS
from tests.longhaul.test_run_on_cluster import site, tree  # noqa: F401

SEVERAL = "llama3_8b_prolong_512k"


def printed() -> dict[str, list[str]]:
    """Return the commands of every shipped recipe's page, each once, under its sub-command."""
    found: dict[str, list[str]] = {}
    for row in ROWS.values():
        for line, _ in show.commands(row):
            found.setdefault(line.split()[1], []).append(line)
    return {name: list(dict.fromkeys(lines)) for name, lines in found.items()}


def words_of(text: str) -> list[list[str]]:
    """Return the words of the commands in a text, whose lines a shell would join."""
    joined = re.sub(r" \\\n\s*", " ", text)
    lines = (line.strip() for line in joined.splitlines())
    return [shlex.split(line, comments=True) for line in lines if line.startswith("longhaul ")]


def test_no_page_tells_to_pretrain_on_one_machine_what_takes_several_nodes():
    lines = printed()
    for line in lines["pretrain"]:
        assert ROWS[line.split()[-1]].nodes == 1
    for line in lines["run"]:
        _, _, _, ladder, _, card, *more = line.split()
        rows = [row for row in ROWS.values() if (row.ladder.name, row.card.name) == (ladder, card)]
        assert rows
        assert ("--executor slurm" in line) == any(row.nodes > 1 for row in rows)
        assert more == [] or YOUR_CLUSTER in more


def test_every_recipe_of_several_nodes_has_a_command_for_its_stage_alone():
    for row in ROWS.values():
        if row.nodes > 1:
            lines = [line for line, _ in show.commands(row) if "--executor slurm" in line]
            assert len(row.ladder.stages) == 1 or any("--stage" in line for line in lines)


@pytest.mark.parametrize("name", ["show", "plan"])
def test_light_commands_of_pages_answer_when_they_are_typed(answer, name):
    typed = {}
    for line in printed()[name]:
        typed.setdefault(line.split()[2], line)
    for line in typed.values():
        code, out, err = answer(*shlex.split(line)[1:])
        assert code == 0, f"{line}: {err}"
        assert out


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "llama31_8b", "--seq", "64K"),
        ("plan", "llama32_1b", "--seq", "64K", "--gpus", "1"),
        ("plan", "llama3_8b", "--seq", "512K", "--nodes", "4"),
        ("plan", "llama3_8b", "--ladder", "prolong", "--nodes", "4"),
        ("doctor", "oom", "--factory", "llama3_8b_nemo_64k", "--layout", "tp2 dp4"),
        ("doctor", "oom", "--card", "llama31_8b", "--ladder", "prolong", "--stage", "512K",
         "--cluster", "dgx_h200", "--nodes", "2", "--layout", "tp2 ulysses4 dp2"),
        ("doctor", "slow", "--factory", "llama3_8b_nemo_64k", "--layout", "tp8 full"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_plan_and_doctor_print_is_parsed(answer, words):
    code, out, err = answer(*words)
    assert code == 0, err
    commands = words_of(out)
    assert commands
    for _, name, *options in commands:
        command = loaded(name)
        context = command.make_context(name, list(options))
        assert context.params or context.args
        on_one = context.params.get("nodes") in (None, 1)
        assert name != "pretrain" or (on_one and "trainer.num_nodes=2" not in options)


@pytest.mark.parametrize(
    ("card", "why"), [("llama31_8b", "takes away the scaling"), ("qwen25_7b", "")]
)
def test_the_plan_and_the_list_name_the_same_ladder_for_a_length(answer, card, why):
    command = f"longhaul pretrain --card {card} --ladder prolong --stage 512K"
    plan = answer("plan", card, "--seq", "512K").out
    listed = answer("recipes", card, "512k").error()
    assert (command in plan, command in listed) == (True, True)
    assert (why in plan.splitlines()[-1], why in listed) == (True, True)


def test_a_plan_of_one_gpu_leads_to_a_recipe_of_one_gpu(answer):
    (words,) = words_of(answer("plan", "llama32_1b", "--seq", "64K", "--gpus", "1").out)
    code, out, err = answer(*words[1:], "--dryrun")
    assert code == 0, err
    assert "--nproc-per-node 1" in out
    assert "devices: 1\n" in out


def test_a_dryrun_of_several_nodes_shows_the_recipe_and_how_it_is_run(answer):
    from recipes import yaml_file

    code, out, err = answer("pretrain", "--factory", SEVERAL, "--dryrun")
    assert code == 0, err
    assert "num_nodes: 4" in out
    command = OnCluster(
        card=CARDS["llama3_8b"], ladder=LADDERS["prolong"], cluster="dgx_h100",
        stage=ROWS[SEVERAL].stage,
    ).command  # fmt: skip
    assert f"on a cluster: {command} (" in out
    path = Path("recipe.yaml")
    path.write_text(out)
    assert yaml_file.read(path).log.name == SEVERAL  # comments and a recipe, no more
    assert command in answer("pretrain", "--factory", SEVERAL).error()


def test_a_local_ladder_of_several_nodes_is_not_cut_down_to_one(answer, small_store):
    said = answer(
        "run", "--ladder", "prolong", "--card", "llama3_8b", "--store", small_store, "--dryrun"
    ).error()
    assert "is laid out on 4 nodes and this machine is one" in said
    assert "num_nodes=1" not in said


@pytest.mark.parametrize(
    ("card", "nodes"), [("llama3_8b", ()), ("qwen25_7b", ("--nodes", 2))], ids=str
)
def test_a_stage_of_several_nodes_is_submitted_alone(answer, tree, card, nodes):  # noqa: F811
    shipped = yaml.safe_load((cluster.FOLDER / "dgx_h100.yaml").read_text())
    code, out, err = answer(
        "run", "--ladder", "prolong", "--card", card, "--stage", "512K", "--executor", "slurm",
        "--cluster", site(tree, hardware=shipped["hardware"]), *nodes, "--source", tree, "--dryrun",
    )  # fmt: skip
    assert code == 0, err
    names = [line.removeprefix("# ---- ") for line in out.splitlines() if "# ---- " in line]
    stage = f"{card}_prolong_512k"
    assert names == ["prepare", stage, f"evaluate_{stage}"]


def test_every_sub_command_is_there_for_what_pages_name():
    assert set(printed()) <= set(COMMANDS)
