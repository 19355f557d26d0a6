# SPDX-License-Identifier: Apache-2.0
"""`longhaul checkpoint diff` of records that the functions of a save have written."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from recipes.checkpoints import record as recording
from recipes.checkpoints.files import FILES, described, for_marker
from recipes.checkpoints.marker import write_marker
from recipes.checkpoints.record import (
    FOLDER,
    RECORD,
    code,
    start_entry,
    start_entry_of,
    withheld_text,
    write_record,
)
from tests.longhaul.commands.test_status import make_run
from tests.longhaul.test_light_commands import after

SECRET = "hf_" + 24 * "a1"
"""In the form of a key, which opens nothing."""


class Saved:
    """A checkpoint with a record and a marker, of a stage with a recipe and a store."""

    def __init__(self, to: Path) -> None:
        self.stage = to / "run" / "stages" / "tiny_512"
        self.checkpoint = self.stage / "checkpoints" / "step=2"
        self.store = to / "store"
        self.store.mkdir(parents=True)
        (self.store / "manifest.json").write_text("{}")
        (self.checkpoint / "weights").mkdir(parents=True)
        self.start = self.stage.parent / "before" / "checkpoints" / "step=4"
        self.trained_before = {"step": 4, "max_steps": 4, "tokenizer": "t"}
        self.start.mkdir(parents=True)
        write_marker(self.start, self.trained_before)
        recipe = {
            "data": {"store": str(self.store)},
            "log": {"ckpt": {"dirpath": str(self.stage / "checkpoints")}},
            "resume": {
                "resume_from_directory": str(self.stage / "checkpoints"),
                "start": str(self.start.parent),
            },
        }
        (self.stage / "config.yaml").write_text(yaml.safe_dump(recipe))
        self.save()

    def save(self, change: dict | None = None) -> None:
        """Write record and marker; `change` replaces entries of the record."""
        write_record(
            self.checkpoint, stage=self.stage, step=2, ranks=2, store=self.store, train_sha256="a",
            start=start_entry(self.start),
        )  # fmt: skip
        path = self.checkpoint / FOLDER / RECORD
        if change is not None:
            path.write_text(json.dumps(json.loads(path.read_text()) | change))
        facts = {"step": 2, "max_steps": 2, "tokenizer": "t"}
        write_marker(self.checkpoint, facts | {FILES: for_marker(described(self.checkpoint))})

    @property
    def record(self) -> dict:
        return json.loads((self.checkpoint / FOLDER / RECORD).read_text())


@pytest.fixture
def saved(tmp_path) -> Saved:
    recording.of_this_process.cache_clear()
    return Saved(tmp_path)


def test_nothing_differs_where_it_was_made_and_nothing_heavy_is_imported(saved, answer):
    code_, out, err = answer("checkpoint", "diff", saved.stage)
    assert code_ == 0, err
    assert out.splitlines()[0].startswith(
        f"{saved.checkpoint}: step 2 of tiny_512, saved {saved.record['saved']} by 2 ranks"
    )
    assert "nothing differs" in out
    done = after("checkpoint", "diff", str(saved.checkpoint), "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["differences"] == []
    assert content["records"] == [saved.record]


def test_of_a_run_the_stages_with_a_complete_checkpoint_are_named(answer, tmp_path):
    both = ("tiny_512", "tiny_2k")
    for saved, names in (((40, 8), both), ((40, 0), both[:1]), ((0, 8), both[1:])):
        run = make_run(tmp_path / f"{saved}", saved=saved)
        (run / "stages/tiny_8k/checkpoints/step=3").mkdir(parents=True)
        told = answer("checkpoint", "diff", run).error()
        named = ", ".join(shlex.quote(str(run / "stages" / name)) for name in names)
        assert f"is a run; name one of its stages: {named}" in told
    run = make_run(tmp_path / "none", saved=(0, 0))
    assert (
        f"{run} is a run without a complete checkpoint" in answer("checkpoint", "diff", run).error()
    )
    told = answer("checkpoint", "diff", run / "run.json").error()
    assert f"{run / 'run.json'} is a file; name the folder" in told


def test_a_copied_run_is_listed_with_the_time_of_the_record(saved, answer):
    saved.save({"saved": "2026-01-02 03:04 UTC"})
    without = saved.start / "longhaul.json"
    os.utime(without, (1e9, 1e9))  # of a checkpoint without a record
    found = json.loads(answer("checkpoint", "list", saved.stage.parents[1], "--json").out)
    assert [one["saved"] for one in found] == ["2001-09-09 01:46 UTC", "2026-01-02 03:04 UTC"]


def test_every_difference_is_a_row_and_the_exit_code_is_1(saved, answer, monkeypatch):
    record = saved.record
    saved.save({
        "versions": record["versions"] | {"torch": "1.0", "apex": "0.1"},
        "code": record["code"] | {"commit": 40 * "0", "changes_sha256": 64 * "1"},
        "machine": record["machine"] | {"gpus": {"NVIDIA H100": 8}},
        "image": "longhaul 0.1.0 on nemo:25.11",
    })  # fmt: skip
    (saved.store / "manifest.json").write_text("{ }")
    found, out, err = answer("checkpoint", "diff", saved.checkpoint)
    assert found == 1, err
    rows = {
        "versions.torch": ("1.0", record["versions"]["torch"]),
        "versions.apex": ("0.1", "absent"),
        "code.commit": ("0" * 12,),
        "code.changes_sha256": ("1" * 12,),
        "machine.gpus.NVIDIA H100": ("8", "absent"),
        "image": ("longhaul 0.1.0 on nemo:25.11", "absent"),
        "store.manifest_sha256": (record["store"]["manifest_sha256"][:12],),
    }
    for what, words in rows.items():
        line = next((line for line in out.splitlines() if what in line), "")
        assert all(word in line for word in words), (what, out)
    assert f"its code: git checkout {40 * '0'}" in err
    shutil.rmtree(saved.store)
    (row,) = (row for row in differences(answer, saved) if row["what"].startswith("store"))
    assert row["second"] == "absent"


def differences(answer, saved: Saved, *words: str) -> list[dict]:
    """Return the differences of the checkpoint, which has some."""
    found, out, _ = answer("checkpoint", "diff", saved.checkpoint, *words, "--json")
    assert found == 1
    return json.loads(out)["differences"]


def test_two_checkpoints_differ_in_recipe_store_and_cluster_file(saved, answer, tmp_path):
    (saved.stage / recording.SUBMITTED).write_text('{"commit": "abc", "cluster": "/a/site.yaml"}')
    (saved.stage / recording.CLUSTER).write_text("executor: slurm\n")
    saved.save()
    other = Saved(tmp_path / "other")
    (other.store / "manifest.json").write_text("{ }")
    for each in (saved, other):
        recipe = {"trainer": {"max_steps": 2, "seed": 1 if each is saved else 2}}
        (each.stage / "config.yaml").write_text(yaml.safe_dump(recipe))
        each.save()
    rows = {row["what"]: row for row in differences(answer, saved, str(other.checkpoint))}
    assert set(rows) == {
        "store.manifest_sha256", "start.path", "cluster.path", "cluster.sha256",
        "recipe.trainer.seed",
    }  # fmt: skip
    assert (rows["recipe.trainer.seed"]["first"], rows["cluster.path"]["second"]) == ("1", "absent")
    code_, out, _ = answer("checkpoint", "diff", saved.checkpoint, saved.checkpoint)
    assert (code_, "nothing differs" in out) == (0, True)
    (row,) = differences(answer, saved)  # the cluster file is not here
    assert (row["what"], row["second"]) == ("cluster.sha256", "absent")
    told = answer("checkpoint", "diff", saved.stage, other.stage, "--store", "x").error()
    assert "--store is where the store is here; leave it out with two checkpoints" in told


def test_a_record_of_an_earlier_version_is_compared(saved, answer):
    record = saved.record
    saved.save({
        "environment": {"NCCL_ALGO": "Ring"}, "code": record["code"] | {"changed_files": []},
        "machine": record["machine"] | {"system": "Linux x86_64", "cpus": 1},
    })  # fmt: skip
    code_, out, _ = answer("checkpoint", "diff", saved.checkpoint)
    assert (code_, "nothing differs" in out) == (0, True)


def test_another_start_or_none_is_a_difference_and_a_newer_one_is_not_taken(saved, answer):
    newer = saved.start.with_name("step=5")
    newer.mkdir()
    write_marker(newer, {"step": 5, "max_steps": 5, "tokenizer": "t"})
    assert answer("checkpoint", "diff", saved.checkpoint)[0] == 0
    (recorded,) = start_entry_of(saved.checkpoint).values()
    assert (recorded["path"], recorded["step"]) == (str(saved.start), 4)
    write_marker(saved.start, saved.trained_before | {"trained_on": "other"})
    found, out, _ = answer("checkpoint", "diff", saved.checkpoint)
    assert found == 1
    (line,) = (line for line in out.splitlines() if "start." in line)
    assert recorded["marker_sha256"][:12] in line
    assert "absent" not in line
    shutil.rmtree(saved.start)
    rows = differences(answer, saved)
    assert {row["what"] for row in rows} == {"start.path", "start.step", "start.marker_sha256"}
    assert {row["second"] for row in rows} == {"absent"}


def test_a_checkpoint_that_is_not_ours_is_compared_by_its_presence(saved, answer, tmp_path):
    start = tmp_path / "imported"
    (start / "weights").mkdir(parents=True)
    saved.save(start_entry(start))
    assert answer("checkpoint", "diff", saved.checkpoint)[0] == 0
    shutil.rmtree(start)
    assert answer("checkpoint", "diff", saved.checkpoint)[0] == 1


def test_a_record_that_names_no_start_says_so_and_random_weights_are_one(saved, answer):
    saved.save(start_entry(None))
    found, _, err = answer("checkpoint", "diff", saved.checkpoint)
    assert (found, "is not recorded" in err) == (0, False)
    path = saved.checkpoint / FOLDER / RECORD
    before = {key: value for key, value in saved.record.items() if key != "start"}
    path.write_text(json.dumps(before))
    (saved.checkpoint / "longhaul.json").unlink()
    facts = {"step": 2, "max_steps": 2, "tokenizer": "t"}
    write_marker(saved.checkpoint, facts | {FILES: for_marker(described(saved.checkpoint))})
    found, _, err = answer("checkpoint", "diff", saved.checkpoint)
    assert (found, "the stage started from is not recorded" in err) == (0, True)
    assert start_entry_of(saved.checkpoint) == {}


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: (folder / RECORD).write_text("{}"), "record.json is damaged: its SHA-256"),
        (lambda folder: (folder / "config.yaml").write_text("a: 1"), "config.yaml is damaged"),
        (lambda folder: (folder / "config.yaml").unlink(), "config.yaml is missing"),
        (shutil.rmtree, f"has no {FOLDER}/{RECORD}: it was saved by an earlier version"),
    ],
)
def test_a_damaged_or_missing_record_is_refused_by_name(saved, answer, harm, said):
    harm(saved.checkpoint / FOLDER)
    found, out, err = answer("checkpoint", "diff", saved.checkpoint)
    assert (found, out) == (2, "")
    assert said in err


def test_no_secret_is_recorded(saved):
    (saved.stage / "config.yaml").write_text(f"a: 1\nlogger: {{api_key: '{SECRET}'}}\n")
    shutil.rmtree(saved.checkpoint / FOLDER)
    saved.save()
    written = "".join(path.read_text() for path in (saved.checkpoint / FOLDER).iterdir())
    assert SECRET not in written
    assert saved.record["withheld"] == {"config.yaml": "line 2 of config.yaml looks like a secret"}
    for line in (
        "-----BEGIN OPENSSH PRIVATE KEY-----", 'password = "correct horse"', "AKIA" + 16 * "A",
        "https://me:word@host/x", "auth_token: 0123456789abcdef",
    ):  # fmt: skip
        assert withheld_text("it", line), line
    for line in ("tokens_per_batch=8192000000", "tokenizer = AutoTokenizer(path)", "key: value"):
        assert not withheld_text("it", line), line


def git(tree: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    done = subprocess.run(["git", "-C", tree, *who, *words], capture_output=True, check=True)
    return done.stdout.decode().strip()


def test_the_changes_of_a_tree_make_it_again_from_its_commit(tmp_path):
    tree = tmp_path / "tree"
    (tree / "recipes").mkdir(parents=True)
    git(tree, "init", "-q")
    (tree / "recipes" / "a.py").write_text("one = 1\n")
    (tree / "recipes" / "b.bin").write_bytes(bytes(range(256)))
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "first")
    assert code(tree)[0] == {
        "commit": git(tree, "rev-parse", "HEAD"), "changes_sha256": "", "new_files": {},
        "withheld": "",
    }  # fmt: skip
    git(tree, "clone", "-q", ".", str(tmp_path / "clone"))
    (tree / "recipes" / "a.py").write_bytes("uno = 1  # \xe4\n".encode("latin-1"))
    (tree / "recipes" / "b.bin").write_bytes(bytes(reversed(range(256))))
    (tree / "recipes" / "new.py").write_text("new = 1\n")
    (tree / "recipes" / "notes.txt").write_text("not code\n")
    found, changes = code(tree)
    assert list(found["new_files"]) == ["recipes/new.py"]
    (tmp_path / "changes.diff").write_bytes(changes)
    git(tmp_path / "clone", "apply", str(tmp_path / "changes.diff"))
    for name in ("a.py", "b.bin"):
        files = (each / "recipes" / name for each in (tree, tmp_path / "clone"))
        assert len({file.read_bytes() for file in files}) == 1
    (tree / "recipes" / "a.py").write_text(f"key = '{SECRET}'\n")
    found, changes = code(tree)
    assert changes == b""
    assert found["withheld"].endswith("of the changes looks like a secret")
    (tree / "recipes" / "a.py").write_text("many = 1\n" * 200_000)
    found, changes = code(tree)
    assert changes == b""
    assert "1,048,576 are kept" in found["withheld"]


def test_a_git_that_fails_is_not_taken_for_no_changes(saved, answer, monkeypatch, tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    git(tree, "init", "-q")
    (tree / "a.py").write_text("one = 1\n")
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "first")
    commit = git(tree, "rev-parse", "HEAD")
    (tree / "a.py").write_text("two = 2\n")
    (tree / ".git" / "index").write_bytes(b"not an index")
    found, changes = code(tree)
    assert (found["commit"], found["changes_sha256"], changes) == (commit, "", b"")
    assert found["withheld"] == "git could not say what has changed"

    recorded = saved.record["code"]
    saved.save({"code": found})
    rows = {row["what"]: row for row in differences(answer, saved)}
    assert rows["code.withheld"]["first"] == found["withheld"]
    assert "not recorded: git could not say" in answer("checkpoint", "diff", saved.checkpoint)[2]
    monkeypatch.setattr(recording, "code", lambda: (found, changes))
    recording.of_this_process.cache_clear()
    assert [row["what"] for row in differences(answer, saved)] == ["code.withheld"]
    saved.save({"code": recorded})
    rows = {row["what"]: row for row in differences(answer, saved)}
    assert rows["code.withheld"]["second"] == found["withheld"]
    recording.of_this_process.cache_clear()


def test_without_git_the_commit_is_the_one_of_the_submission(saved, monkeypatch, tmp_path):
    monkeypatch.setattr(recording.shutil, "which", lambda _: None)
    recording.of_this_process.cache_clear()
    saved.save()
    assert saved.record["code"]["commit"] == ""
    (saved.stage / recording.SUBMITTED).write_text('{"commit": "abc"}')
    (saved.stage / recording.CLUSTER).write_text("executor: slurm\n")
    saved.save()
    recording.of_this_process.cache_clear()
    assert saved.record["code"]["commit"] == "abc"
    assert (saved.checkpoint / FOLDER / "cluster.yaml").read_text() == "executor: slurm\n"
