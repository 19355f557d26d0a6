# SPDX-License-Identifier: Apache-2.0
"""`longhaul run --executor slurm` and `longhaul clusters`: what is told before a job is made."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from datasets import config

from data.prepare import prepare
from recipes.spec import cluster

TASKS = Path(__file__).parents[2] / "eval" / "harness" / "tasks"
RUN = ("run", "--ladder", "tiny", "--executor", "slurm", "--nodes", "2", "--device", "cpu")


@pytest.fixture
def tree(tmp_path):
    """Return a folder that is a git tree with a commit."""
    git = ["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "x"], check=True)
    return tmp_path


def site(folder, **sections):
    """Write a cluster file that lacks nothing but what is said."""
    program = folder / "venv" / "bin" / "python"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.touch()
    given = {
        "executor": "slurm",
        "slurm": {"account": "me", "ask_for_gpus": "none"},
        "python": str(folder / "venv"),
    }
    path = folder / "site.yaml"
    path.write_text(yaml.safe_dump(given | sections))
    return path


def test_a_dry_run_prints_every_script_in_order_and_leaves_nothing(answer, tree):
    words = ("--eval-every", 0, "--eval-cp", 2, "--eval-pp", 2, "--profile", "steps=2:3 ranks=all")
    code, shown, said = answer(*RUN, "--cluster", site(tree), *words, "--debug-comm", "--dryrun")
    assert code == 0, said
    assert "# tiny_2k is evaluated on 4 ranks: TP 1, CP 2, PP 2" in shown
    assert "# tiny_2k is evaluated as often as takes 1% of the time while it trains" in shown
    assert "# tiny_2k: steps 2 to 3 on ranks all are profiled into " in shown
    assert "# the ranks of tiny_2k compare every collective; that slows its steps" in shown
    assert shown.count("export NCCL_DEBUG=INFO") == 3  # of the stages, not of their evaluations
    logs = re.findall(r"export NCCL_DEBUG_FILE=.*/stages/(\w+)/nccl_%h_%p.log", shown)
    assert logs == ["tiny_512", "tiny_2k", "tiny_8k"]
    names = [line.removeprefix("# ---- ") for line in shown.splitlines() if "# ---- " in line]
    assert names == [
        "prepare", "tiny_512", "evaluate_tiny_512", "tiny_2k", "evaluate_tiny_2k", "tiny_8k",
        "evaluate_tiny_8k",
    ]  # fmt: skip
    assert "#SBATCH --account=me" in shown
    assert not (tree / "stores").exists()
    assert not (tree / "runs").exists()


@pytest.mark.parametrize("word", ["-1", "often", "1.5"])
def test_other_words_than_a_number_of_steps_or_never_are_refused(answer, word):
    code, _, said = answer(*RUN, "--eval-every", word, "--dryrun")
    assert code == 2
    assert f"--eval-every is '{word}'; expected a number of steps" in said


def test_an_unknown_tracker_is_refused_before_anything_is_submitted(answer, tree):
    code, _, said = answer(*RUN, "--track", "wandb", "--track", "otel", "--dryrun")
    assert code == 2
    assert "`--track otel` is not in this release" in said
    (tree / "longhaul.toml").write_text('track = "wandb,wndb"\n')
    code, _, said = answer(*RUN, "--dryrun")
    assert (code, "no tracker is called 'wndb'; did you mean wandb?" in said) == (2, True)


def test_a_store_is_made_by_a_plan_an_array_and_a_merge_when_jobs_are_asked_for(answer, tree):
    for name in ("web", "code"):
        (tree / name).mkdir()
    sources = ("--source", "web=web", "--source", "code=code", "--prepare-jobs", "4")
    code, shown, said = answer(*RUN, "--cluster", site(tree), *sources, "--dryrun")
    assert code == 0, said
    scripts = dict(text.partition("\n")[::2] for text in shown.split("# ---- ")[1:])
    assert list(scripts)[:4] == ["prepare_plan", "prepare_parts", "prepare", "tiny_512"]
    arrays = [name for name, script in scripts.items() if "#SBATCH --array=0-3" in script]
    assert arrays == ["prepare_parts"]
    assert "/outcomes/prepare_parts.$SLURM_ARRAY_TASK_ID\n" in scripts["prepare_parts"]
    assert 'requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' in scripts["prepare_parts"]
    assert 'requeue "$SLURM_JOB_ID"' in scripts["prepare"]
    assert "--prepare-jobs" in answer("run", "--ladder", "tiny", "--prepare-jobs", 2).error()


@pytest.mark.parametrize(
    ("sections", "words", "said"),
    [
        ({"slurm": {}}, (), "slurm.account is CHANGE_ME; set it in the file, or by --account of"),
        ({"slurm": {"acct": "me"}}, (), "slurm has no field 'acct'; did you mean account"),
        ({"container": {"image": "/nowhere.sqsh"}}, (), "image /nowhere.sqsh is not there"),
        ({"container": {"image": "CHANGE_ME"}}, (), "site: container.image is CHANGE_ME"),
        ({"container": {"image": "acme#x:1", "mounts": ["/s:/s"]}}, (), "run folder"),
        ({"python": "/nowhere/venv"}, (), "/nowhere/venv/bin/python is not there"),
        ({"slurm": {"account": "me", "sbatch": {"array": "0-3"}}}, (), "several times in the same"),
        ({}, ("--source", "books"), "--source books is not there"),
        ({"executor": "local"}, (), "a chain needs a scheduler with job dependencies"),
        ({"tunnel": {"kind": "ssh", "host": "127.0.0.1", "port": 1, "user": "me", "folder": "/x"}},
         (), "tunnel.host 127.0.0.1 does not answer on port 1"),
        ({}, ("--eval-tp", "4"), "PP 1: 4 heads and 2 KV heads are not both divisible by TP 4"),
        ({}, ("--eval-pp", "6"), "CP 1 and PP 6: 2 layers are not divisible by PP 6, nor are 4 wi"),
        ({}, ("--gate", "pasky=1"), "a gate has no 'pasky'; did you mean passkey?"),
        ({}, ("--profile", "steps=5:99"), "tiny_2k has 48 steps; expected steps from 1 to 48"),
    ],
    ids=str,
)  # fmt: skip
def test_a_mistake_is_told_before_anything_is_submitted(answer, tree, sections, words, said):
    assert said in answer(*RUN, "--cluster", site(tree, **sections), *words).error()
    assert not (tree / "runs").exists()


def with_suites(tree, task: str, include: Path):
    """Write a ladder of two stages that runs a task; return the words that submit it on CPU."""
    stages = [
        {"seq_length": 512, "start": "scratch"},
        {"seq_length": 1024, "gate": {"suites": [{"task": task, "drop": 0.1}]}},
    ]
    common = {"tokens": 8192, "tokens_per_batch": 8192, "lr": {"peak": 1e-3}}
    suites = [{"tasks": [task], "include": str(include)}]
    file = tree / "own.yaml"
    ladder = {"name": "own", "suites": suites, "stages": [common | stage for stage in stages]}
    file.write_text(yaml.safe_dump(ladder))
    words = ("run", "--executor", "slurm", "--ladder", file, "--card", "tiny", "--device", "cpu")
    return (*words, "--nodes", 1, "--out", tree / "runs" / "own")


def test_the_suites_of_a_ladder_are_jobs_after_each_evaluation(answer, tree, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = with_suites(tree, "words_choice", TASKS)
    code, shown, said = answer(*words, "--cluster", site(tree), "--dryrun")
    assert code == 0, said
    scripts = dict(text.partition("\n")[::2] for text in shown.split("# ---- ")[1:])
    assert list(scripts) == [
        "prepare", "tiny_own_512", "evaluate_tiny_own_512", "suites_tiny_own_512", "tiny_own_1k",
        "evaluate_tiny_own_1k", "suites_tiny_own_1k",
    ]  # fmt: skip
    script = scripts["suites_tiny_own_1k"]
    assert "LONGHAUL_OUTCOME=" in script
    assert "/outcomes/suites_tiny_own_1k\n" in script
    assert f"export HF_DATASETS_CACHE={config.HF_DATASETS_CACHE}" in script
    assert "export HF_HUB_OFFLINE=1" in script
    assert "HF_DATASETS_CACHE" not in scripts["evaluate_tiny_own_1k"]
    for executor in ("slurm", "local"):  # not after a store was made, and in a dry run too
        here = ("--executor", executor, *(("--dryrun",) if executor == "slurm" else ()))
        said = answer("run", *words[3:9], *here, "--eval-pp", 2).error()
        assert "--eval-pp is 2, and ladder own runs suites" in said
    assert not (tree / "runs").exists()
    assert not (tree / "stores").exists()


@pytest.mark.parametrize(
    ("task", "files", "sections", "said"),
    [
        pytest.param(  # the harness reads all of its tasks, as for test_tasks' unknown names
            "words_chioce", TASKS, {}, "is called 'words_chioce'; did you mean words_choice or",
            marks=pytest.mark.nightly,
        ),
        ("words_choice", "lost", {}, "task words_choice reads words.jsonl, which is not in"),
        ("made", "made", {}, "task made makes its prompts with the tokenizer of the store, which"),
        ("words_choice", TASKS, {"environment": {"HF_HOME": "/x"}}, "sets HF_HOME to /x, and the"),
        ("words_choice", TASKS, {"python": "bare"}, "bare, which has no lm-evaluation-harness"),
        ("words_choice", TASKS, {"container": {"image": "acme#x:1", "mounts": ["/no:/no"]}},
         "the cache of the suites' data (HF_HOME) "),
    ],
    ids=["unknown", "lost", "tokenizer", "cache", "harness", "container"],
)  # fmt: skip
def test_suites_that_would_fail_are_refused_before_anything_is_submitted(
    answer, tree, monkeypatch, task, files, sections, said
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tree / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tree / "cache")
    for name in ("lost", "made"):
        (tree / name).mkdir()
    (tree / "lost" / "words.yaml").write_text((TASKS / "words.yaml").read_text())
    (tree / "made" / "made.py").write_text("def made(**given):\n    given['max_seq_lengths']\n")
    (tree / "made" / "made.yaml").write_text(
        "task: made\ncustom_dataset: !function made.made\noutput_type: generate_until\n"
    )
    if "python" in sections:
        program = tree / "bare" / "bin" / "python"
        program.parent.mkdir(parents=True)
        program.write_text('#!/bin/sh\nexec "$REAL" -S "$@"\n')
        program.chmod(0o755)
        monkeypatch.setenv("REAL", sys.executable)
        sections = {"python": str(tree / "bare")}
    words = with_suites(tree, task, tree / files)
    sections = {"python": sys.prefix, **sections}
    if "container" in sections:
        sections["python"] = None
    assert said in answer(*words, "--cluster", site(tree, **sections)).error()
    assert not (tree / "runs").exists()


@pytest.mark.nightly  # the harness reads all of its tasks
def test_tasks_make_prompts_with_the_tokenizer_of_another_store(answer, tree, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tree / "books").mkdir()
    for number in range(40):
        (tree / "books" / f"{number}.txt").write_text(f"{number} little words that go on. " * 30)
    prepare(str(tree / "books"), tree / "other", vocab_size=300)
    words = (*with_suites(tree, "niah_single_1", TASKS), "--tokenizer", tree / "other")
    said = answer(*words, "--cluster", site(tree, python=sys.prefix)).error()
    # told after the prompts of the task are made, so the tokenizer was found
    assert "suites niah_single_1 needs a length of the prompts that the suite makes" in said


def test_a_second_chain_into_the_same_folder_is_refused(answer, tree, monkeypatch):
    launch = tree / "runs" / "tiny" / "launch"
    launch.mkdir(parents=True)
    (launch / "jobs.json").write_text('{"tiny_512": "11"}')
    programs = tree / "programs"
    programs.mkdir()
    for name in ("squeue", "srun"):
        (programs / name).write_text("#!/bin/sh\necho 11 PENDING\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    said = answer(*RUN, "--cluster", site(tree)).error()
    assert "11 tiny_512 (pending)" in said
    assert "scancel 11" in said
    assert not (tree / "runs" / "tiny" / "run.json").exists()
    assert answer(*RUN, "--cluster", site(tree), "--dryrun").code == 0


def test_a_store_that_evaluation_would_find_too_short_is_refused(answer, tree):
    (tree / "books").mkdir()
    for number in range(40):
        (tree / "books" / f"{number}.txt").write_text(f"{number} little words that go on. " * 30)
    prepare(str(tree / "books"), tree / "stores" / "tiny", vocab_size=300)
    said = answer(*RUN, "--cluster", site(tree), "--dryrun").error()
    assert "evaluation at 8,192 needs a longer one" in said


def test_other_mistakes_of_the_command_line(answer, tmp_path):
    asked = ("run", "--ladder", "tiny")
    assert "expected local or slurm" in answer(*asked, "--executor", "k8s").error()
    assert "laid out for CPU ranks of this machine" in answer(*asked, "--nodes", 2).error()
    assert "--account cannot go with --executor local" in answer(*asked, "--account", "x").error()
    assert "did you mean dgx_h100" in answer(*RUN, "--cluster", "dgx_h10").error()
    assert (
        "run the command in a clone of Longhaul"
        in answer(*RUN, "--cluster", site(tmp_path)).error()
    )
    card = ("run", "--ladder", "ultralong_1m", "--executor", "slurm", "--cluster", site(tmp_path))
    assert "name --source DOCUMENTS to make one first" in answer(*card).error()


@pytest.mark.parametrize("command", ["clusters", "ladders"])
def test_a_file_in_place_of_a_sub_command_is_answered_with_the_one_that_checks_it(answer, command):
    assert f"to check it: longhaul {command} check 'my own.yaml'" in (
        answer(command, "my own.yaml").error()
    )


def test_a_shipped_name_in_place_of_a_sub_command_is_answered_with_the_one_that_shows_it(answer):
    for command, name in (("ladders", "apertus15_8b"), ("clusters", "dgx_h100")):
        said = answer(command, name).error()
        assert said.endswith(
            f"`longhaul {command}` has no command {name}; to look at the file or the shipped "
            f"name: longhaul {command} check {name}"
        )
        assert "Did you mean 'check'" in answer(command, "checks").err


def test_clusters_are_listed_and_checked(answer, tmp_path):
    shown = answer("clusters").out
    assert all(name in shown for name in ("local", *cluster.names()))
    found = answer("clusters", "check", "dgx_h100")
    assert found.code == 1
    assert "FAIL  slurm.account is CHANGE_ME" in found.out
    assert "FAIL  container.image is CHANGE_ME" in found.out
    assert "everything a launch needs is set" in answer("clusters", "check", site(tmp_path)).out
    ssh = site(tmp_path, tunnel={"kind": "ssh", "host": "h", "identity": "/no/key"})
    lacking = answer("clusters", "check", ssh).out
    assert "FAIL  tunnel.user is missing" in lacking
    assert "FAIL  tunnel.identity /no/key is not there" in lacking
