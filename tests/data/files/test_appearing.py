# SPDX-License-Identifier: Apache-2.0
"""A folder appears whole or not at all, and what lay beside it stays."""

from pathlib import Path

import pytest

from data.files.appearing import appearing, require_free


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_it_appears_once_it_is_filled_and_nothing_else_does(tmp_path):
    with appearing(tmp_path / "a" / "new") as part:
        (part / "weights").touch()
        assert not (tmp_path / "a" / "new").exists()
    assert everything(tmp_path) == ["a", "a/new", "a/new/weights"]
    other = tmp_path / "other"
    other.mkdir()
    assert (tmp_path / "a" / "new").stat().st_mode == other.stat().st_mode


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_where_filling_it_fails(tmp_path, error):
    (tmp_path / "there").mkdir()

    def fail() -> None:
        with appearing(tmp_path / "there" / "a" / "b" / "new") as part:
            (part / "weights").touch()
            raise error

    with pytest.raises(error):
        fail()
    assert everything(tmp_path) == ["there"]


def test_a_folder_of_the_user_with_a_name_like_it_stays(tmp_path):
    (tmp_path / "new.part").mkdir()
    (tmp_path / "new.part" / "thesis.txt").touch()
    with appearing(tmp_path / "new"):
        pass
    assert everything(tmp_path) == ["new", "new.part", "new.part/thesis.txt"]


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ("there", "already exists"),
        ("file/x/y", "file is not a folder"),
        ("dangling", "dangling is a link"),
        ("dangling/x", "dangling is not a folder"),
        ("n" * 300, "too long"),
    ],
)
def test_what_is_not_free_is_refused_and_left_alone(tmp_path, at, said):
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nothing")
    before = everything(tmp_path)
    with pytest.raises(ValueError, match=said):
        require_free(tmp_path / at)
    with pytest.raises(ValueError, match=said), appearing(tmp_path / at):
        pass
    assert everything(tmp_path) == before
