# SPDX-License-Identifier: Apache-2.0
"""The git tree that jobs get: what it lacks, and a folder that has none."""

import subprocess

import pytest

from longhaul.jobs.git_tree import uncommitted

GIT = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]


def test_a_folder_outside_git_is_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"git refuses .* \(not a git repository .*\); run"
    ) as told:
        uncommitted()
    assert str(told.value).endswith("run the command in a clone of Longhaul")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="git is not installed here"):
        uncommitted()


def test_a_tree_without_a_commit_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    subprocess.run([*GIT, "init", "--quiet"], check=True)
    with pytest.raises(ValueError, match=r"has no commit; run the command in a clone"):
        uncommitted()


def test_new_modules_that_git_does_not_know_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "known.py").touch()
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "x"]):
        subprocess.run([*GIT, *command], check=True)
    assert uncommitted() == []
    (tmp_path / "recipes" / "known.py").write_text("changed\n")
    for name in ("recipes/new.py", "slurm/clusters/mine.yaml", "recipes/notes.txt", "plot.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    changed, new = uncommitted()
    assert changed.startswith("1 changed files are not committed")
    assert new == (
        "2 new files are not in git, and jobs do not get them: recipes/new.py, "
        "slurm/clusters/mine.yaml"
    )
