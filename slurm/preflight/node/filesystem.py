# SPDX-License-Identifier: Apache-2.0
"""Checks of a job's folders: write, sync, rename, read, verify, and shared by all nodes.

Checkpoints are written under a temporary name and renamed, so the check does the same.
"""

import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from data.files.writable import existing, reason, require_folder
from data.store import Manifest, StoreError
from data.token_files import verification
from recipes.spec.units import GiB
from slurm.preflight.check import Group, PreflightCheck
from slurm.preflight.requirements import Expected

MB = 1_000_000
PIECE = 4 * MB
WRITTEN = 64 * MB
"""Bytes written to measure the speed, or as many as SECONDS allow."""
SECONDS = 5.0


def folder_checks(
    expected: Expected, host: str, written: int = WRITTEN
) -> Iterator[PreflightCheck]:
    """Yield the checks of the run's folders and the store, if stated; `written` is in bytes."""
    if expected.run_folder is not None:
        yield from _run_folder(expected, expected.run_folder, host, written)
    if expected.checkpoint_folder is not None:
        yield from _checkpoint_folder(expected, expected.checkpoint_folder)
    if expected.store is not None:
        yield _readable(expected.store)


def content_checks(expected: Expected) -> Iterator[PreflightCheck]:
    """Yield the check of the store's content by its sums; one rank makes it for the job."""
    if expected.store is None or not expected.store.is_dir() or expected.verify == "none":
        return
    name = "store's content"
    try:
        manifest = Manifest.load(expected.store)
        read = verification.verify(manifest, whole=expected.verify == "whole")
    except StoreError as error:
        said, _, remedy = str(error).partition("; ")
        yield PreflightCheck.failure(Group.FILES, name, said, remedy or "prepare the store again")
        return
    except OSError as error:  # raised on one rank, it would leave the others waiting
        said = f"{error.filename or expected.store}: {reason(error)}"
        yield PreflightCheck.failure(
            Group.FILES, name, said, "restore the file, or prepare the store again"
        )
        return
    said = f"{read / 1e6:,.1f} MB read, SHA-256 as written"
    if expected.verify == "whole" or verification.is_sampled(manifest):
        yield PreflightCheck.ok(Group.FILES, name, said)
    else:
        yield PreflightCheck.warning(
            Group.FILES, name, f"{said}; the tokens of this store have no sums of blocks",
            "verify all of it with --verify, or prepare the store again",
        )  # fmt: skip


def _run_folder(
    expected: Expected, folder: Path, host: str, written: int
) -> Iterator[PreflightCheck]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        speed = _speed(folder, host, written)
    except OSError as error:
        yield PreflightCheck.failure(
            Group.FILES, "run folder", f"{folder}: {reason(error)}", _remedy(error, folder)
        )
        return
    said = f"{folder}: {speed:,.0f} MB/s written and synced"
    if speed < expected.least_write_mbps:
        yield PreflightCheck.warning(
            Group.FILES, "run folder", f"{said}; {expected.least_write_mbps:,.0f} MB/s expected",
            "a checkpoint will take longer than planned: take a faster file system, or save less "
            "often",
        )  # fmt: skip
    else:
        yield PreflightCheck.ok(Group.FILES, "run folder", said)
    if expected.free_gib:
        yield _free_space(expected, folder)


def _checkpoint_folder(expected: Expected, folder: Path) -> Iterator[PreflightCheck]:
    """Yield whether checkpoints can be written, and the free space of their own file system."""
    try:
        require_folder(folder, "log.ckpt.dirpath")
    except ValueError as error:
        yield PreflightCheck.failure(
            Group.FILES, "checkpoint folder", str(error),
            "let the job's user write there, or leave it in the run folder",
        )  # fmt: skip
        return
    yield PreflightCheck.ok(Group.FILES, "checkpoint folder", f"{folder}: can be written to")
    of_run, there = expected.run_folder, existing(folder)
    elsewhere = of_run is None or existing(of_run).stat().st_dev != there.stat().st_dev
    if expected.free_gib and elsewhere:
        yield _free_space(expected, there)


def _free_space(expected: Expected, folder: Path) -> PreflightCheck:
    free = shutil.disk_usage(folder).free / GiB
    if free < expected.free_gib:
        return PreflightCheck.failure(
            Group.FILES, "free space",
            f"{free:,.1f} GiB of {folder}; {expected.free_gib:,.1f} GiB needed",
            "delete old checkpoints, or take another file system",
        )  # fmt: skip
    return PreflightCheck.ok(Group.FILES, "free space", f"{free:,.1f} GiB")


def _speed(folder: Path, host: str, written: int) -> float:
    """Write, sync and rename a file, read it back and remove it; return MB/s of the writing."""
    part = folder / f".preflight-{host}-{os.getpid()}.part"
    whole = part.with_suffix(".whole")
    piece, size = os.urandom(min(PIECE, written)), 0
    try:
        begun = time.perf_counter()
        with part.open("wb") as file:
            while size < written and time.perf_counter() - begun < SECONDS:
                size += file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        took = time.perf_counter() - begun
        part.rename(whole)
        with whole.open("rb") as file:
            if file.read(len(piece)) != piece:
                raise OSError(errno.EIO, "what was written reads differently")
    finally:
        for path in (part, whole):
            if path.exists():
                path.unlink()
    return size / MB / max(took, 1e-9)


def _readable(folder: Path) -> PreflightCheck:
    try:
        inside = sorted(folder.iterdir())
        first = next((path for path in inside if path.is_file()), None)
        if first is not None:
            with first.open("rb") as file:
                file.read(4096)
    except OSError as error:
        return PreflightCheck.failure(
            Group.FILES, "store", f"{folder}: {reason(error)}",
            "mount it on every node (mounts of the cluster file), or prepare it",
        )  # fmt: skip
    if not inside:
        return PreflightCheck.failure(
            Group.FILES, "store", f"{folder} is empty", "prepare it, as `longhaul prepare` does"
        )
    return PreflightCheck.ok(Group.FILES, "store", f"{folder}: {len(inside)} entries")


def _remedy(error: OSError, folder: Path) -> str:
    if error.errno == errno.EROFS:
        return "mount it writable, or name another run folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room, or name another run folder"
    return f"let the job's user write to {folder}, or name another run folder"


def awaited(path: Path, content: str, seconds: float) -> str | None:
    """Return why a file written by another node cannot be read; None if it can.

    Network file systems show new files late, so reading is retried for `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            if path.read_text() == content:
                return None
            why = "its content differs"
        except OSError as error:
            why = reason(error)
        if time.monotonic() > deadline:
            return why
        time.sleep(0.1)
