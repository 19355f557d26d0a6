# SPDX-License-Identifier: Apache-2.0
"""A place is tried by writing, and trying it leaves nothing."""

import os
from pathlib import Path

import pytest

from data.files.writable import existing, require_file, require_folder


@pytest.fixture
def places(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.json").write_text("{}")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "pipe.json")
    return tmp_path


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("at", ["new.json", "a/b/new.json", "file.json", "dangling"])
def test_a_file_that_can_be_written_is_taken_and_nothing_is_made(places, at):
    before = everything(places)
    require_file(places / at, "--out")
    assert everything(places) == before
    assert (places / "file.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ("folder", "folder is a folder; name a file"),
        ("pipe.json", "is a device or a pipe"),
        ("file.json/x.json", "file.json is not a folder"),
        ("dangling/x.json", "dangling is not a folder"),
        ("circle/x.json", "levels of symbolic links"),
        ("n" * 300, "name too long"),
        ("new.txt", "is not a .json file"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_by_its_option(places, at, said):
    before = everything(places)
    suffixes = (".json",) if at.endswith(".txt") else ()
    with pytest.raises(ValueError, match=said) as refused:
        require_file(places / at, "--out", suffixes)
    assert str(refused.value).startswith(f"--out {places / at}")
    assert everything(places) == before


def test_a_link_is_tried_where_it_points_to(places):
    (places / "link.json").symlink_to("/proc/new.json")
    with pytest.raises(ValueError, match=r"--out .*/link.json cannot be written"):
        require_file(places / "link.json", "--out")


def test_a_folder_is_taken_where_it_is_or_can_be_made(places):
    before = everything(places)
    for at in ("folder", "folder/a/b", "new"):
        require_folder(places / at, "--to", room=2**20)
    assert everything(places) == before


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ("file.json", "is a file; expected a folder"),
        ("file.json/x", "file.json is not a folder"),
        ("pipe.json", "is a file; expected a folder"),
    ],
)
def test_a_file_where_a_folder_is_meant_is_refused(places, at, said):
    with pytest.raises(ValueError, match=said):
        require_folder(places / at, "--to")


def test_a_file_system_of_the_kernel_is_refused():
    with pytest.raises(ValueError, match=r"--to /proc/new cannot be written"):
        require_folder(Path("/proc/new"), "--to")


def test_room_that_is_not_there_is_told_with_both_sizes(places):
    with pytest.raises(ValueError, match=r"needs about 1,048,576.0 GiB and its file system has"):
        require_folder(places / "new" / "store", "--to", room=2**50)
    assert existing(places / "new" / "store") == places
