# SPDX-License-Identifier: Apache-2.0
"""The order of samples in a store: no code of its files runs, and runs at once do not collide."""

import json
import logging
import os
import pickle
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from data.files.sha256 import sha256_of
from data.store import StoreError
from data.token_files.cached_order import ARRAYS, FILES, SUMS, Order, read, read_or_build
from tests.data.payload import Payload

NAME = "0123-NumberedDataset-train"
DESCRIPTION = "what it was built from"


def built() -> Order:
    return (
        np.arange(5, dtype=np.int32),
        np.arange(8, dtype=np.int32).reshape(4, 2),
        np.array([2, 0, 1], dtype=np.uint32),
    )


def not_built() -> Order:
    raise AssertionError("an order that is there is built again")


def order_of(
    folder: Path, build: Callable[[], Order] = built, *, writes: bool = True
) -> list[list[int]]:
    order = read_or_build(folder, NAME, DESCRIPTION, build, writes=writes)
    return [array.tolist() for array in order]


RIGHT = [array.tolist() for array in built()]


def write_sums(folder: Path) -> None:
    """Write sums of the files that are there, as whoever can write the files can."""
    sums = sha256_of([folder / f"{NAME}-{file}" for file in FILES])
    (folder / f"{NAME}-{SUMS}").write_text(json.dumps(dict(zip(FILES, sums, strict=True))))


def with_pickle(path: Path, payload: Payload, kind: str) -> None:
    """Write a file that runs code if `numpy.load` reads it with pickles allowed."""
    if kind == "pickle":
        path.write_bytes(pickle.dumps(payload))
    elif kind == "array of objects":
        np.save(path, np.array([payload], dtype=object), allow_pickle=True)
    else:
        fields = np.zeros(1, dtype=[("number", "i4"), ("object", "O")])
        fields["object"][0] = payload
        np.save(path, fields, allow_pickle=True)


@pytest.mark.parametrize("file", ARRAYS)
@pytest.mark.parametrize("kind", ["pickle", "array of objects", "array of fields"])
def test_code_in_a_file_with_right_sums_does_not_run(tmp_path: Path, file: str, kind: str) -> None:
    folder, ran = tmp_path / "index", tmp_path / "ran"
    order_of(folder)
    path = folder / f"{NAME}-{file}"
    with_pickle(path, Payload(ran), kind)
    write_sums(folder)
    with pytest.raises(StoreError, match=f"{path} is damaged: it cannot be read as an array"):
        read(folder, NAME)
    assert order_of(folder) == RIGHT
    assert not ran.exists()
    assert order_of(folder, not_built) == RIGHT
    with_pickle(path, Payload(ran), kind)
    np.load(path, allow_pickle=True)
    assert ran.is_dir()  # the file does have code


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.ones((4, 2)), "it holds float64 of 2 dimensions instead of integers of 2"),
        (np.arange(8), "it holds int64 of 1 dimensions instead of integers of 2"),
    ],
)
def test_an_array_of_another_form_is_refused(tmp_path: Path, array: np.ndarray, said: str) -> None:
    order_of(tmp_path)
    np.save(tmp_path / f"{NAME}-sample_index.npy", array)
    write_sums(tmp_path)
    with pytest.raises(StoreError, match=f"sample_index.npy is damaged: {said}"):
        read(tmp_path, NAME)


@pytest.mark.parametrize("file", [*FILES, SUMS])
@pytest.mark.parametrize("harm", ["flip", "remove"])
def test_a_file_that_is_damaged_or_missing_is_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, harm: str
) -> None:
    order_of(tmp_path)
    path = tmp_path / f"{NAME}-{file}"
    content = path.read_bytes()
    if harm == "flip":
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    else:
        path.unlink()
    with pytest.raises(StoreError, match=f"{NAME}-.* is (damaged|missing): "):
        read(tmp_path, NAME)
    assert order_of(tmp_path) == RIGHT
    assert "; the order of samples is built again" in caplog.text
    assert path.read_bytes() == content
    assert order_of(tmp_path, not_built) == RIGHT


def test_a_rank_that_does_not_write_builds_what_it_cannot_read(tmp_path: Path) -> None:
    assert order_of(tmp_path / "index", writes=False) == RIGHT
    assert not (tmp_path / "index").exists()
    order_of(tmp_path)
    assert order_of(tmp_path, not_built, writes=False) == RIGHT
    path = tmp_path / f"{NAME}-shuffle_index.npy"
    damaged = path.read_bytes()[:-4] + b"\x07\0\0\0"
    path.write_bytes(damaged)
    assert order_of(tmp_path, writes=False) == RIGHT
    assert path.read_bytes() == damaged


def test_runs_that_start_at_once_on_a_new_store_write_the_same_and_keep_each_other_s_files(
    tmp_path: Path,
) -> None:
    runs = 4
    none_is_there = threading.Barrier(runs)
    orders: list[list[list[int]]] = []

    def build() -> Order:
        none_is_there.wait(20)
        return built()

    threads = [
        threading.Thread(target=lambda: orders.append(order_of(tmp_path, build)))
        for _ in range(runs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert orders == [RIGHT] * runs
    assert order_of(tmp_path, not_built) == RIGHT
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{NAME}-{file}" for file in (*FILES, SUMS)
    )


def test_a_file_is_there_at_every_moment_while_another_run_writes_it(tmp_path: Path) -> None:
    order_of(tmp_path)
    (tmp_path / f"{NAME}-{SUMS}").unlink()  # as long as the first run computes them
    first = {file: (tmp_path / f"{NAME}-{file}").open("rb") for file in FILES}
    ended = threading.Event()
    missing: list[str] = []

    def look() -> None:
        while not ended.is_set():
            missing.extend(f for f in FILES if not (tmp_path / f"{NAME}-{f}").exists())

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(50):
        assert order_of(tmp_path) == RIGHT
        (tmp_path / f"{NAME}-{SUMS}").unlink()
    ended.set()
    looking.join()
    assert missing == []
    for file, opened in first.items():  # what the first run has mapped is the same too
        with opened:
            order_of(tmp_path)
            assert opened.read() == (tmp_path / f"{NAME}-{file}").read_bytes()


@pytest.fixture
def made_read_only(tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """Return a folder as a function that then mounts it read-only, or changes its mode."""
    folder = tmp_path / "store"
    mounted: list[Path] = []
    folder.mkdir()

    def made() -> Path:
        if os.geteuid() != 0:
            folder.chmod(0o555)
            return folder
        for words in (["--bind", folder, folder], ["-o", "remount,ro,bind", folder]):
            if subprocess.run(["mount", *words], capture_output=True, check=False).returncode:
                pytest.skip("root may write everywhere here, and may not mount")
            mounted[:] = [folder]
        return folder

    yield made
    if mounted:
        subprocess.run(["umount", folder], check=True)
    folder.chmod(0o755)


@pytest.mark.parametrize("before", ["nothing", "older than sums", "damaged"])
def test_a_read_only_store_is_a_warning_and_the_order_is_built(
    tmp_path: Path,
    made_read_only: Callable[[], Path],
    caplog: pytest.LogCaptureFixture,
    before: str,
) -> None:
    folder = tmp_path / "store"
    if before != "nothing":
        order_of(folder)
    if before == "older than sums":
        (folder / f"{NAME}-{SUMS}").unlink()
    elif before == "damaged":
        (folder / f"{NAME}-shuffle_index.npy").write_bytes(b"half a file")
    made_read_only()
    there = sorted(folder.iterdir())
    assert order_of(folder) == RIGHT
    assert f"{folder} cannot be written (" in caplog.text
    assert "one start with a writable store keeps it there" in caplog.text
    assert sorted(folder.iterdir()) == there


def test_a_whole_order_of_a_read_only_store_is_read(
    tmp_path: Path, made_read_only: Callable[[], Path], caplog: pytest.LogCaptureFixture
) -> None:
    order_of(tmp_path / "store")
    assert order_of(made_read_only(), not_built) == RIGHT
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
