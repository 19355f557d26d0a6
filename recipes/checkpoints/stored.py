# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run as they lie on the disk, and which of them may be removed; light."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from custom_modules.checkpoints.index import INDEX, CheckpointError
from data.files.json_object import json_object
from recipes.checkpoints.files import Reading, require_index, require_whole, saved_files, weights_of
from recipes.checkpoints.marker import MARKER, checkpoint_facts, is_marked
from recipes.checkpoints.record import FOLDER, RECORD, shown_time

LAYOUT = "layout.json"
"""File of a checkpoint: ranks and kinds of parallelism that wrote it. Earlier versions lack it."""
_STEP = re.compile(r"step=(\d+)")
_DATA = re.compile(r"__(\d+)_\d+\.distcp")
_OPTIMIZER = b"optimizer.state"
"""In the names of an optimizer's tensors in the index."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A folder `step=N` of a stage."""

    stage: str
    folder: Path
    step: int
    bytes: int
    modified: float
    """Unix time of its newest file, which is the time of the copy in a folder that was copied."""
    saved: str
    """When it was saved, as its record states; without a record the time of its newest file."""
    problem: str = ""
    """Why it cannot be used; empty if it is complete. Contents are not compared."""
    layout: dict[str, int] = field(default_factory=dict)
    """Ranks that wrote it, and their TP, CP, PP and DP; only the ranks for earlier versions. Empty
    for an import and a mean, which one command wrote.
    """
    optimizer: bool | None = None
    """Whether it has the optimizer's state; None if its index cannot be read."""
    rotation: Any = None
    """The rotation in its marker, if that has one."""

    @property
    def complete(self) -> bool:
        """Whether a training, an evaluation or an export may read it."""
        return not self.problem


def stored(checkpoints: Path, stage: str) -> list[Stored]:
    """Return the checkpoints in a stage's folder by step, also those that are not complete."""
    folders = checkpoints.iterdir() if checkpoints.is_dir() else ()
    found = [
        _stored(folder, stage, int(match[1]))
        for folder in folders
        if (match := _STEP.fullmatch(folder.name)) and folder.is_dir()
    ]
    return sorted(found, key=lambda one: one.step)


def _stored(folder: Path, stage: str, step: int) -> Stored:
    files = [path for path in folder.rglob("*") if path.is_file()]
    sizes = [path.stat() for path in files]
    facts: dict[str, Any] = {}
    problem = ""
    if not is_marked(folder):
        problem = "it was not finished: a save or a removal was interrupted"
    else:
        try:
            facts = checkpoint_facts(folder) or {}
            require_whole(folder)
        except CheckpointError as error:
            problem = str(error)
    optimizer = _has_optimizer(folder)
    modified = max((size.st_mtime for size in sizes), default=folder.stat().st_mtime)
    recorded = json_object(folder / FOLDER / RECORD).get("saved")
    by_ranks = files if problem or optimizer is not False else ()
    return Stored(
        stage=stage, folder=folder, step=step, problem=problem,
        bytes=sum(size.st_size for size in sizes),
        modified=modified,
        saved=recorded if isinstance(recorded, str) else shown_time(modified),
        layout=_layout(folder, by_ranks), optimizer=optimizer,
        rotation=facts.get("rotation"),
    )  # fmt: skip


def _layout(folder: Path, files: Sequence[Path]) -> dict[str, int]:
    try:
        found = json.loads((folder / LAYOUT).read_text())
        return {str(name): int(size) for name, size in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        writers = {int(match[1]) for path in files if (match := _DATA.fullmatch(path.name))}
        return {"ranks": max(writers) + 1} if writers else {}


def require_optimizer(checkpoint: Path) -> None:
    """Raise ValueError if a checkpoint has no state of an optimizer to carry over."""
    if not _has_optimizer(checkpoint):
        raise ValueError(
            f"{checkpoint} has no state of an optimizer to carry over, as an import or an average "
            "has none; start from a checkpoint of training, or set resume.optimizer=new"
        )


def _has_optimizer(folder: Path) -> bool | None:
    """Return whether the index names tensors of an optimizer; it is searched, not loaded."""
    try:
        return _OPTIMIZER in (weights_of(folder) / INDEX).read_bytes()
    except OSError:
        return None


def damages(checkpoint: Path) -> list[str]:
    """Return a sentence for each file that differs from what was saved; all files are read.

    Raises CheckpointError for a checkpoint that cannot be read at all, or has no SHA-256 sums.
    """
    files = saved_files(checkpoint)
    if files is None:
        require_whole(checkpoint)
        raise CheckpointError(f"{checkpoint} was saved without SHA-256 sums; only sizes are known")
    with Reading(checkpoint, files) as reading:
        found = reading.damaged()
    if not found:
        require_index(checkpoint)
    return found


def removable(
    found: Sequence[Stored], *, keep_last: int, keep_every: int, needed: Sequence[Path]
) -> list[Stored]:
    """Return the checkpoints of a stage that a policy removes.

    Of the complete ones the last `keep_last` stay (at least one), those whose step is a multiple of
    `keep_every` (0: none for that reason), and those in `needed`. Unfinished ones go, a complete
    marker that is damaged stays: it may be restored.
    """
    complete = [one for one in found if one.complete]
    kept = {one.folder for one in complete[-max(1, keep_last) :]}
    kept |= {one.folder for one in complete if keep_every and one.step % keep_every == 0}
    kept |= {one.folder for one in found if one.folder.resolve() in needed}
    kept |= {one.folder for one in found if not one.complete and is_marked(one.folder)}
    return [one for one in found if one.folder not in kept]


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, its marker first, so that it is never taken for a complete one."""
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)
    checkpoint.with_name(checkpoint.name + "-unfinished").unlink(missing_ok=True)
