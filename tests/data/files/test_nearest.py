# SPDX-License-Identifier: Apache-2.0
"""The path that was probably meant."""

from pathlib import Path

from data.files.nearest import near_path


def test_a_like_name_in_the_same_folder_is_suggested(tmp_path):
    (tmp_path / "prolong.yaml").touch()
    assert near_path(tmp_path / "prolnog.yaml") == f" (did you mean {tmp_path / 'prolong.yaml'}?)"
    assert near_path(tmp_path / "books.jsonl") == ""
    assert near_path(tmp_path / "prolong.yaml") == ""  # it is there
    assert near_path(tmp_path / "none" / "prolong.yaml") == ""


def test_a_path_without_a_folder_is_suggested_without_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my model").mkdir()
    assert near_path(Path("my_model")) == " (did you mean my model?)"
