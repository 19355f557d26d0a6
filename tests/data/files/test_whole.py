# SPDX-License-Identifier: Apache-2.0
"""A file or a folder appears whole or not at all, and an error names what was to be written."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data.files.whole import chain, folder_beside, replacing, write_text

LIMITED = """
import resource, sys
from pathlib import Path
from data.files.whole import write_text
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_text(Path(sys.argv[1]), "x" * 100_000)
except OSError as error:
    print(error.errno, error.filename)
"""
STOPPED = """
import os, signal, sys
from pathlib import Path
from data.files.whole import folder_beside
with folder_beside(Path(sys.argv[1])) as folder:
    (folder / "tokens").touch()
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
"""


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_file_is_replaced_at_once_and_its_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b" / "page.html"
    write_text(path, "one")
    with replacing(path) as hidden:
        hidden.write_text("two")
        assert path.read_text() == "one"
    assert path.read_text() == "two"
    assert everything(tmp_path) == ["a", "a/b", "a/b/page.html"]


@pytest.mark.parametrize("there", [True, False])
def test_a_symbolic_link_stays_and_what_it_points_to_is_written(tmp_path, there):
    page, link = tmp_path / "other" / "page.html", tmp_path / "link.html"
    link.symlink_to("other/page.html")
    if there:
        page.parent.mkdir()
        page.write_text("one")
    with pytest.raises(KeyboardInterrupt), replacing(link) as hidden:  # noqa: PT012
        hidden.write_text("half")
        raise KeyboardInterrupt
    kept = ["link.html", "other", "other/page.html"] if there else ["link.html"]
    assert everything(tmp_path) == kept
    write_text(link, "two")
    assert everything(tmp_path) == ["link.html", "other", "other/page.html"]
    assert link.is_symlink()
    assert page.read_text() == "two"


def test_a_durable_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, synced = tmp_path / "marker.json", []

    def sync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((Path(name).name, os.fstat(descriptor).st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", sync)
    write_text(path, "content", durable=True)
    hidden, folder = synced
    assert hidden == (f".marker.json.{os.getpid()}.tmp", 7, False)
    assert (folder[0], folder[2]) == (tmp_path.name, True)
    write_text(path, "content")
    assert len(synced) == 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_of_a_file_that_was_not_finished(tmp_path, error):
    def fail() -> None:
        with replacing(tmp_path / "a" / "b" / "page.html") as hidden:
            hidden.write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert everything(tmp_path) == []


def test_a_file_that_is_there_stays_where_the_new_one_is_not_finished(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("one")
    with pytest.raises(ValueError, match="stop"), replacing(path) as hidden:  # noqa: PT012
        hidden.write_text("half")
        raise ValueError("stop")
    assert everything(tmp_path) == ["page.html"]
    assert path.read_text() == "one"


def test_a_file_beyond_what_may_be_written_is_named_and_nothing_is_left(tmp_path):
    path = tmp_path / "new" / "page.html"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(errno.EFBIG), str(path)]
    assert everything(tmp_path) == []


def test_a_name_as_long_as_names_may_be_is_written(tmp_path):
    path = tmp_path / ("n" * 250 + ".html")
    write_text(path, "one")
    assert everything(tmp_path) == [path.name]


def test_a_folder_is_removed_with_those_made_for_it_where_filling_it_fails(tmp_path):
    def fail() -> None:
        with folder_beside(tmp_path / "a" / "b" / "store") as hidden:
            assert hidden.parent == tmp_path / "a" / "b"
            (hidden / "tokens").touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space") as full:
        fail()
    assert full.value.filename == str(tmp_path / "a" / "b" / "store")
    assert everything(tmp_path) == []


def test_a_full_disk_is_named_through_a_library_s_own_error(tmp_path):
    def fail() -> None:
        with folder_beside(tmp_path / "export"):
            try:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                raise RuntimeError("unexpected pos 704 vs 598")

    with pytest.raises(RuntimeError) as told:
        fail()
    full = next(link for link in chain(told.value) if isinstance(link, OSError))
    assert full.filename == str(tmp_path / "export")


def test_an_error_of_another_file_keeps_its_name(tmp_path):
    with pytest.raises(FileNotFoundError) as missing, replacing(tmp_path / "page.html"):
        (tmp_path / "source").read_text()
    assert missing.value.filename == str(tmp_path / "source")


def test_a_disk_that_cannot_be_read_is_not_taken_for_the_place(tmp_path):
    with pytest.raises(OSError, match="rror") as failed, replacing(tmp_path / "page.html"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))  # as `read` raises it
    assert failed.value.filename is None


def test_a_process_that_is_told_to_end_removes_its_folder(tmp_path):
    done = subprocess.run([sys.executable, "-c", STOPPED, str(tmp_path / "store")], check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert everything(tmp_path) == []
