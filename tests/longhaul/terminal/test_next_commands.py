# SPDX-License-Identifier: Apache-2.0
"""The commands that pages tell a user to type next are accepted when they are typed."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from longhaul.cli import COMMANDS, loaded
from longhaul.commands import show
from longhaul.jobs import ladder_run
from longhaul.terminal.next_commands import YOUR_CLUSTER, OnCluster
from recipes.hugging_face.config import exported_config
from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.shipped import select
from recipes.shipped.machines import Machines
from recipes.shipped.table import ROWS
from recipes.spec import cluster
from tests.longhaul.commands.test_run_on_slurm import site, tree  # noqa: F401

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


def trained_by(page: str) -> list[list[str]]:
    """Return the words of a plan's commands, without those that make weights and a store first."""
    return [words for words in words_of(page) if words[1] not in ("import", "prepare")]


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


def recipes_of(words: list[str]) -> list:
    """Return the recipes that a printed command trains, its overrides applied; needs NeMo."""
    from longhaul.jobs import local_chain
    from recipes.resolved import overrides as resolved_overrides
    from recipes.shipped import factories

    _, name, *options = words
    context = loaded(name).make_context(name, list(options))
    given, overrides = context.params, context.args
    if name == "pretrain":
        if given["factory"]:
            recipe = factories.recipe_named(given["factory"])
        else:
            names = (given[kind] for kind in ("card", "ladder", "stage"))
            recipe = select.choose(*names, machines_of(given))()
        return [resolved_overrides.override(recipe, overrides)]
    submitted = given["executor"] == "slurm"
    assert name == "run"
    ladder, card = ladder_run.choose(given["ladder"], given["card"], given["stage"])
    only = select.stage_of(ladder, given["stage"]) if given["stage"] else None
    plan = ladder_run.plan(ladder, card, None, None, only=only)
    assert (given["cluster"] == YOUR_CLUSTER) == submitted
    rows = ladder_run.rows(plan, machines_of(given), submitted=submitted)
    return [stage.recipe for stage in local_chain.stages(plan, rows, overrides, None)]


def machines_of(given: dict) -> Machines:
    """Return the machines that the options of a command state; the user's cluster is a DGX H100."""
    options = {name: given[name] for name in ("nodes", "gpus", "layout", "cluster", "device")}
    if options["cluster"] == YOUR_CLUSTER:
        options["cluster"] = "dgx_h100"
    return Machines(**options)


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ("plan llama31_8b --seq 64K", 8),
        ("plan llama32_1b --seq 64K --gpus 1", 1),
        ("plan llama3_8b --seq 512K --nodes 4", 32),
        ("plan llama3_8b --ladder prolong --nodes 4", 32),
        ("plan llama32_1b --ladder nemo --gpus 1", 1),
        ("plan llama32_1b --ladder nemo --gpus 2 --fp8 tensorwise", 2),
        ("plan llama32_1b --ladder nemo --nodes 2 --fp8 tensorwise", 16),
        ("plan tiny --ladder tiny", 8),
        ("doctor oom --factory llama3_8b_nemo_64k --layout 'tp2 dp4'", 8),
        ("doctor oom --card llama31_8b --ladder prolong --stage 512K --cluster dgx_h100 --nodes 2"
         " --layout 'tp2 ulysses4 dp2'", 16),
        ("doctor slow --factory llama3_8b_nemo_64k --layout 'tp8 full'", 8),
        ("recipes llama31_405b prolong 512k", 16 * 8),
        ("recipes qwen3", 8),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_commands_print_is_accepted_with_its_overrides(answer, words, gpus):
    from recipes.resolved.read import world_size

    code, out, err = answer(*shlex.split(words))
    assert code == 0 or "type `longhaul" in err, err
    apart = re.sub(r"`(longhaul [^`]*)`", r"\n\1\n", out or err).replace(
        ": longhaul", ":\nlonghaul"
    )
    commands = [command for command in words_of(apart) if command[1] in ("pretrain", "run")]
    assert commands
    for command in commands:
        for recipe in recipes_of(command):
            assert world_size(recipe) == gpus, command


def test_a_printed_command_with_a_key_that_is_not_there_is_noticed():
    words = "longhaul pretrain --factory llama3_8b_nemo_64k trainer.device=1"
    with pytest.raises(ValueError, match="did you mean"):
        recipes_of(shlex.split(words))


@pytest.mark.parametrize(
    ("words", "stages"),
    [
        ("--nodes 4", None),
        ("--gpus 1", None),
        ("--gpus 16 --fp8 tensorwise", "trainer.plugins.fp8_recipe=tensorwise"),
    ],
    ids=["whole nodes", "a part of one", "FP8"],
)
def test_a_bill_s_json_has_the_commands_of_its_own_plan(answer, words, stages):
    asked = ("plan", "llama32_1b", "--ladder", "nemo", *words.split())
    found, page = json.loads(answer(*asked, "--json").out), answer(*asked).out
    if stages is None:
        assert found["command"] in page
        assert not [stage for stage in found["stages"] if "command" in stage]
        return
    assert found["command"] is None
    printed = [shlex.join(line) for line in trained_by(page)]
    assert [stage["command"] for stage in found["stages"]] == printed
    assert all(stages in line for line in printed)


def test_a_stage_s_own_batch_and_budget_are_said_where_others_were_asked_for(answer):
    asked = ("plan", "llama31_8b", "--seq", "64K")
    said = "its budget of 2.1B, not those of --tokens"
    assert said in answer(*asked, "--tokens", "5B").out
    assert (
        f"{said}-per-batch and --tokens"
        in answer(*asked, "--tokens", "5B", "--tokens-per-batch", "8M").out
    )
    of_stage = ("--tokens", LADDERS["nemo"].stages[1].tokens, "--tokens-per-batch", "4M")
    for same in ((), of_stage):
        assert "not those of" not in answer(*asked, *same).out


def test_the_doctor_s_command_keeps_the_cluster(answer):
    asked = ("--factory", "llama31_8b_nemo_128k", "--layout", "dp8")
    out = answer("doctor", "slow", *asked, "--cluster", "dgx_a100").out
    (line,) = re.findall(r"`(longhaul doctor oom [^`]*)`", out)
    assert "--cluster dgx_a100" in line
    again = answer(*shlex.split(line)[1:])
    assert again.code == 0
    assert "GPUs of dgx_a100" in again.out
    assert "--cluster" not in answer("doctor", "slow", *asked, "--cluster", "dgx_h100").out


def test_a_plan_of_one_gpu_leads_to_a_recipe_of_one_gpu(answer):
    (words,) = trained_by(answer("plan", "llama32_1b", "--seq", "64K", "--gpus", "1").out)
    code, out, err = answer(*words[1:], "--dryrun")
    assert code == 0, err
    assert "--nproc-per-node 1" in out
    assert "devices: 1\n" in out


def test_a_folder_with_the_name_of_a_shipped_card_is_named_in_every_command(answer):
    card = CARDS["llama32_1b"]
    folder = Path("weights/llama32_1b")
    folder.mkdir(parents=True)
    config = exported_config(None, card, card.native_rope, card.native_context, "bfloat16")
    (folder / "config.json").write_text(json.dumps(config))
    (planned,) = trained_by(answer("plan", folder, "--seq", "64K", "--nodes", "1").out)
    assert planned[planned.index("--card") + 1] == str(folder)
    shown = answer("show", "--card", folder, "--ladder", "nemo", "--stage", "64K").out
    imported = next(words for words in words_of(shown) if words[1] == "import")
    assert imported[2:] == ["--from", str(folder), "--to", "models/llama32_1b"]
    of = [words for words in words_of(shown) if words[1] == "prepare"]
    assert [words[words.index("--tokenizer") + 1] for words in of] == [str(folder)]
    shutil.copytree(folder, folder / "hugging_face")  # as an import has it
    shown = answer("show", "--card", folder, "--ladder", "nemo", "--stage", "64K").out
    (of_import,) = [words for words in words_of(shown) if words[1] == "prepare"]
    named = of_import[of_import.index("--tokenizer") + 1]
    assert named == str(folder / "hugging_face")


def test_a_dryrun_of_several_nodes_shows_the_recipe_and_how_it_is_run(answer):
    from recipes.resolved import yaml_file

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
    asked = ("run", "--ladder", "prolong", "--card", "llama3_8b", "--store", small_store)
    said = answer(*asked).error()
    code, out, err = answer(*asked, "--dryrun")
    assert code == 0, err
    assert said.removeprefix("error: ").strip() in out
    assert "is laid out on 4 nodes and this machine is one" in said
    assert "num_nodes=1" not in said
    submitted = OnCluster(card=CARDS["llama3_8b"], ladder=LADDERS["prolong"], cluster="dgx_h100")
    assert f"submit the ladder to a cluster: {submitted.command} (" in said


def test_a_recipe_file_of_several_nodes_is_told_that_ladders_are_submitted(answer):
    code, _, err = answer("show", SEVERAL, "--to-yaml", "recipe.yaml")
    assert code == 0, err
    said = answer("pretrain", "--yaml", "recipe.yaml").error()
    assert "a recipe file cannot be submitted to a cluster; submit --factory NAME" in said
    path = Path("recipe.yaml")
    path.write_text(path.read_text().replace(f"name: {SEVERAL}", "name: mine"))
    said = answer("pretrain", "--yaml", "recipe.yaml").error()
    assert said.startswith("error: mine is laid out on 4 nodes")


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


def of_four_gpus(tree: Path) -> Path:  # noqa: F811
    """Write a cluster file of nodes with four GPUs."""
    shipped = yaml.safe_load((cluster.FOLDER / "dgx_h100.yaml").read_text())
    return site(tree, hardware=shipped["hardware"] | {"gpus_per_node": 4})


def test_jobs_of_a_shipped_recipe_take_the_nodes_of_the_cluster_that_is_named(
    answer,
    tree,  # noqa: F811
):
    code, out, err = answer(
        "pretrain", "--factory", "llama3_8b_nemo_16k", "--executor", "slurm", "--cluster",
        of_four_gpus(tree), "--dryrun",
    )  # fmt: skip
    assert code == 0, err
    assert "#SBATCH --nodes=2\n" in out
    assert "#SBATCH --ntasks-per-node=4\n" in out
    assert "# ---- prepare" not in out  # there is no store yet, and the stage is shown without


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ("recipes llama31_405b prolong 512k", 16 * 8),
        ("plan llama3_8b --seq 512K --nodes 8", 8 * 4),
        ("show llama3_8b_prolong_512k --nodes 4 --cluster dgx_h100", 4 * 8),
    ],
)
def test_commands_with_a_default_cluster_have_its_nodes(
    answer,
    tree,  # noqa: F811
    monkeypatch,
    words,
    gpus,
):
    monkeypatch.chdir(tree)
    Path("longhaul.toml").write_text(f'cluster = "{of_four_gpus(tree)}"\n')
    code, out, err = answer(*words.split())
    assert code == 0 or "type `longhaul" in err, err
    found = re.findall(r"--cluster (\S+) --nodes (\d+)", re.sub(r" \\\n\s*", " ", out or err))
    assert found
    for name, nodes in found:
        each = 8 if name in (YOUR_CLUSTER, "dgx_h100") else 4
        assert int(nodes) * each == gpus


def test_a_scaled_recipe_is_submitted_in_the_layout_that_is_shown(answer):
    out = answer("show", "llama3_8b_prolong_64k", "--nodes", "8").out
    assert "the shipped layout, on other machines" in out
    (line,) = [line for line in out.splitlines() if "--executor slurm" in line]
    assert "--nodes 8 --layout 'tp2" in line
