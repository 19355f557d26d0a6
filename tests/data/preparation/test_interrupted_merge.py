# SPDX-License-Identifier: Apache-2.0
"""A process that is killed while it merges or moves a store leaves nothing that cannot continue."""

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from data.preparation import plan
from data.preparation.work import Work
from data.prepare import prepare, run_tasks, write_plan
from data.store import Manifest
from tests.data.preparation.conftest import contents

CHANGES = frozenset({"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link"})
"""Audit events of calls that change a folder; `open` does if it opens a file for writing."""


def killed_before_change(number: int, do: Callable[[], object], since: Path | None) -> bool:
    """Do work in a process that kills itself before a change; return False if it ends before.

    Changes are counted from 0, and from when the file `since` exists if one is given.
    """
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        return os.WIFSIGNALED(status)
    try:
        left = number

        def kill(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & 3
            if (event in CHANGES or writes) and (since is None or os.path.exists(since)):
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        sys.addaudithook(kill)
        do()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@pytest.mark.parametrize(
    "overwrite",
    [pytest.param(False, marks=pytest.mark.nightly), True],
    ids=["new", "overwrite"],
)
def test_a_merge_killed_before_any_change_of_a_file_is_continued_by_the_same_command(
    mixed, tokenizer_folder, tmp_path: Path, reference: Manifest, monkeypatch, overwrite: bool
) -> None:
    monkeypatch.setattr(plan, "SHARD_BYTES", 2**20)
    old_store = Path(tokenizer_folder).parent
    options = {"tokenizer": tokenizer_folder, "heldout_fraction": 0.3}
    done = write_plan(mixed, tmp_path / "done" / "store", **options).folder
    run_tasks(done, 0, 1)
    expected, old = contents(reference.root), contents(old_store)
    states = set()
    for number in count():
        place = tmp_path / str(number) / "store"
        work = Work.of_store(place).folder
        shutil.copytree(done, work)
        if overwrite:
            shutil.copytree(old_store, place)

        def do(place: Path = place) -> Manifest:
            return prepare(mixed, place, overwrite=overwrite, **options)

        # An old store is first touched once the new one is complete.
        killed = killed_before_change(number, do, work / "merged.json" if overwrite else None)
        there = contents(place) if place.exists() else None
        assert there in (None, expected, *([old] if overwrite else []))
        if there is None and overwrite:
            assert contents(work / "old") == old
        has_work = work.exists() and any(work.iterdir())
        states.add((there is None, there == expected, has_work))
        if has_work:
            do()
            assert os.listdir(place.parent) == ["store"]
        assert contents(place) == expected
        shutil.rmtree(place.parent)
        if not killed:
            break
    assert states == {
        (not overwrite, False, True),  # while it is merged
        (True, False, True),  # before it is moved, or between the two moves of an overwrite
        (False, True, True),  # while the parts are removed
        (False, True, False),
    }
