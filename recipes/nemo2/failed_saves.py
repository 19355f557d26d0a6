# SPDX-License-Identifier: Apache-2.0
"""Say that a checkpoint was not saved, or will not fit: in the log and in `health.jsonl`."""

import logging
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from custom_modules.checkpoints.index import CheckpointError
from data.files.whole import NO_ROOM, chain
from recipes.checkpoints.files import saved_files
from recipes.checkpoints.marker import newest_checkpoint
from recipes.nemo2.local_errors import KILLED
from recipes.spec.finding import Finding, append, begins

LOG = logging.getLogger("custom_modules.checkpoints")
"""The first rank of a training shows its messages; Python's warnings are off there."""
NO_RESULTS = "results_queue"
"""In Megatron's words where a process in the background ended without results."""


class SaveFailedError(RuntimeError):
    """Raised on all ranks when the last checkpoint of a training could not be saved."""


def reason(errors: Iterable[BaseException]) -> tuple[str, bool] | None:
    """Return this rank's errors in a sentence, and whether a file system was full; None for none.

    Only the first rank has the details of Megatron's error about writing processes.
    """
    links = [link for error in errors for link in chain(error)]
    if not links:
        return None
    full = any(isinstance(link, OSError) and link.errno in NO_ROOM for link in links)
    said = next((link for link in links if isinstance(link, OSError) and link.errno), links[-1])
    words = f"{type(said).__name__}: {said}".split()
    if NO_RESULTS in words:  # what is left of a process in the background that was killed
        words = KILLED.split()
    return " ".join(words), full or "No space left" in " ".join(map(str, links))


def newest_bytes(folder: Path) -> int | None:
    """Return the size of the newest complete checkpoint below a folder; None if not known."""
    try:
        newest = newest_checkpoint(folder)
        files = None if newest is None else saved_files(newest)
    except (CheckpointError, OSError):  # a training does not end for it
        return None
    return sum(file.bytes for file in files.values()) if files else None


def room(folder: Path) -> int | None:
    """Return the free bytes of a folder's file system; None if it is gone."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def too_full(checkpoints: Path) -> Finding | None:
    """Return a finding if another checkpoint of the size of the newest will not fit."""
    needed, free = newest_bytes(checkpoints), room(checkpoints)
    if needed is None or free is None or free >= needed:
        return None
    return Finding(
        kind="disk_full",
        step=0,
        said=f"the next checkpoint needs about {needed / 1e9:,.3g} GB like the last one, and the "
        f"file system of {checkpoints} has {free / 1e9:,.3g} GB left",
        cause="the file system is nearly full; the last checkpoint is kept until the next is "
        "complete, so both have to fit",
        remedy="the training goes on; free some room, for example in another run: "
        "`longhaul checkpoint prune RUN --keep-last 1`",
    )


def failure(checkpoint: Path, said: str, full: bool, again: str) -> Finding:
    """Return the finding about a failed save; `again` says when it is tried again."""
    needed, free = newest_bytes(checkpoint.parent), room(checkpoint.parent)
    if needed is not None and free is not None and free < needed:
        full = True
    size = "" if needed is None else f"; it needs about {needed / 1e9:,.3g} GB"
    left = "" if free is None else f", and {free / 1e9:,.3g} GB are free"
    return Finding(
        kind="disk_full" if full else "failed_save",
        step=0,
        said=f"{checkpoint.name} could not be saved ({said}){size}{left}; {again}",
        cause="the file system is full" if full else "writing failed on a rank",
        remedy="free some room"
        if full
        else f"see that every rank can write into {checkpoint.parent}",
    )


def tell(stage: Path, step: int, finding: Finding) -> None:
    """Log a finding, and append it to the stage's record with its step if that can be written."""
    LOG.warning("%s; %s", finding.said, finding.remedy)
    with suppress(OSError):
        append(stage, [begins(replace(finding, step=step))])
