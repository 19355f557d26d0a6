# SPDX-License-Identifier: Apache-2.0
"""Read checkpoints without running code, and verify their checksums at the same time.

All reads of a checkpoint use `verified`: training, evaluation, export and merging. The checkpoint
is read in its block; meanwhile threads compute the checksums, each file on one rank of the job, and
all ranks get the result. The cost is 0.7 s of a CPU core per GB; if cores are idle, hashing
overlaps with reading (benchmarks/reliability/verification.py).
"""

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from custom_modules.checkpoints.index import CheckpointError, ForeignClassError
from custom_modules.checkpoints.safe_loading import is_of_content, read_safely, require_common
from data.files.whole import chain
from recipes.checkpoints.files import (
    CONTEXT,
    HUGGING_FACE,
    DamagedFileError,
    Reading,
    SavedFile,
    damage,
    described,
    note,
    require_index,
    saved_files,
    saved_names,
    weights_of,
)

LOG = logging.getLogger("custom_modules.checkpoints")
"""Child of the logger whose messages the first rank of a training shows."""
OF_RANK = re.compile(r"(?:^|/)__(0|[1-9]\d*)_\d+\.distcp$")


@contextmanager
def verified(
    checkpoint: Path, *, verify: bool = True, but: tuple[str, ...] = (CONTEXT, HUGGING_FACE)
) -> Iterator[None]:
    """Read a checkpoint in the block; raise CheckpointError if it differs from what was saved.

    If torch.distributed is initialised all ranks must enter, and all raise. Files in the folders
    `but` are not compared. With `verify` False nothing is compared, which is logged; foreign
    classes are still refused.
    """
    read_safely()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    why = note(checkpoint, verify)
    if why is not None and rank == 0:
        LOG.warning(why)
    files = (saved_files(checkpoint, but=but) or {}) if verify else {}
    with Reading(checkpoint, files, rank=rank, ranks=ranks) as reading:
        try:
            require_index(checkpoint)  # torch would hide what is wrong with it
            require_common(weights_of(checkpoint) / "common.pt")
            yield
        except (Exception, CheckpointException) as error:
            refused, of_all = refusal(error), is_of_all_ranks(error)
            if refused is None and isinstance(error, ValueError) and not is_of_content(error):
                raise  # already reported
            if isinstance(refused, ForeignClassError) or (refused is not None and not of_all):
                refused = damage(checkpoint, files, refused) or refused
            else:
                _require_undamaged(reading, ranks if of_all else 1)
            if refused is None:
                raise
            raise refused from None
        began = time.monotonic()
        _require_undamaged(reading, ranks)
        if files and rank == 0:
            LOG.info(
                "verified %s: %d files of %.1f MB, %.1f s after it was read",
                checkpoint, len(files), reading.bytes / 1e6, time.monotonic() - began,
            )  # fmt: skip


def refusal(error: BaseException) -> CheckpointError | None:
    """Return the CheckpointError that an exception is or was caused by, or None.

    Torch wraps the exceptions of ranks in its own, and NeMo wraps that once more.
    """
    return next((link for link in chain(error) if isinstance(link, CheckpointError)), None)


def is_of_all_ranks(error: BaseException) -> bool:
    """Return whether torch has raised an error, or its cause, on every rank."""
    return any(isinstance(link, CheckpointException) for link in chain(error))


@contextmanager
def one_rank() -> Iterator[None]:
    """Initialise the process group that torch's checkpoint reader needs, of this process only."""
    if dist.is_initialized():
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, and missing in torch's stubs
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _require_undamaged(reading: Reading, ranks: int) -> None:
    """Raise DamagedFileError, on all ranks, for the first file that a rank found damaged."""
    for damaged in _of_all(reading.damaged(), ranks):
        for sentence in damaged:
            raise DamagedFileError(sentence)


def described_by_ranks(checkpoint: Path) -> dict[str, SavedFile]:
    """Return all files of a checkpoint that was just saved; every rank must call it.

    If a rank cannot read one, all ranks raise its OSError.

    A rank reads the data files that it wrote, which may still be cached, and the first rank all
    others. Only the first rank lists all files: with 1,024 ranks and 2 files each, listing on every
    rank would be two million requests to a shared file system.
    """
    if not dist.is_initialized():
        return described(checkpoint)
    dist.barrier()  # all have written
    rank, ranks = dist.get_rank(), dist.get_world_size()
    began = time.monotonic()
    mine: dict[str, SavedFile] | OSError
    try:
        mine = described(checkpoint, names_of_rank(checkpoint, rank, ranks))
    except OSError as error:
        mine = error
    files: dict[str, SavedFile] = {}
    for part in _of_all(mine, ranks):
        if isinstance(part, OSError):
            raise part
        files |= part
    if rank == 0:
        LOG.info(
            "%s: SHA-256 of %.1f MB in %.1f s",
            checkpoint, sum(file.bytes for file in files.values()) / 1e6, time.monotonic() - began,
        )  # fmt: skip
    return files


def names_of_rank(checkpoint: Path, rank: int, ranks: int) -> list[str]:
    """Return the files that a rank describes: its own data files; the first rank also all others.

    The folder may have data files of an earlier save by more ranks; the first rank describes those.
    """
    weights = weights_of(checkpoint)
    if rank == 0:
        beneath = weights.relative_to(checkpoint)
        return [
            name
            for name in saved_names(checkpoint)
            if PurePosixPath(name).parent != PurePosixPath(beneath) or not _writer(name, ranks)
        ]
    return [
        path.relative_to(checkpoint).as_posix()
        for path in weights.glob(f"__{rank}_*.distcp")
        if _writer(path.name, ranks) == rank
    ]


def _writer(name: str, ranks: int) -> int:
    """Return the rank that wrote a file by its name, 0 if the name has no rank."""
    match = OF_RANK.search(name)
    rank = 0 if match is None else int(match[1])
    return rank if rank < ranks else 0


def _of_all(mine: Any, ranks: int) -> list[Any]:
    """Return the values of all ranks on every rank."""
    if ranks == 1:
        return [mine]
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, mine)
    return gathered
