# SPDX-License-Identifier: Apache-2.0
"""PyTorch's flight recorder: each rank's last collectives, written where a collective fails.

When a collective of NCCL has waited longer than its timeout, or has failed, that rank tells the
others by the job's store, and each writes a file before it is ended, also a rank that hangs outside
of NCCL. A rank whose watchdog stops writes one too. The files of an attempt are in a folder:

    stages/NAME/flight_recorder/5123.0/rank_7     job 5123, first attempt, rank 7

The monitor of a process's first group of NCCL writes them, so no group may be made and closed
before training (slurm/preflight/ranks/measurement.py). PyTorch 2.9 and older record nothing by
default, and 2.10 renamed the settings: both names are set before it, and then the new one.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

FOLDER = "flight_recorder"
PREFIX = "rank_"
ENTRIES = 2000
"""Collectives that a rank keeps, as newer PyTorch does; some hundred bytes each, on the host."""
RENAMED = (2, 10)
"""Release of PyTorch from which the old names warn."""
_FILE = re.compile(rf"{PREFIX}(\d+)")


def record_collectives(stage: Path) -> None:
    """Have this rank keep its last collectives, for its groups of NCCL that are made from now on.

    Variables that a user has set stay. What an earlier attempt of this name left for this rank
    goes, so that the files of a hang are of one attempt.
    """
    attempt = os.environ.get("TORCHELASTIC_RUN_ID") or "none"
    folder = stage / FOLDER / re.sub(r"[^A-Za-z0-9.-]", "-", attempt)
    folder.mkdir(parents=True, exist_ok=True)
    prefix = folder / PREFIX
    Path(f"{prefix}{os.environ.get('RANK', '0')}").unlink(missing_ok=True)
    renamed = Version(version("torch")).release[:2] >= RENAMED
    _set(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), str(prefix), renamed)
    _set(("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1", renamed)
    if not renamed:
        _set(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), str(ENTRIES), renamed)


def _set(names: tuple[str, ...], value: str, renamed: bool) -> None:
    """Set a variable under its new name, and before the renaming under the old one too."""
    given = next((os.environ[name] for name in names if name in os.environ), None)
    if given is None or not renamed:
        os.environ.update(dict.fromkeys(names[: 1 if renamed else None], given or value))


@dataclass(frozen=True, kw_only=True, slots=True)
class Dump:
    """The files that the ranks of one attempt wrote."""

    folder: Path
    ranks: tuple[int, ...]
    first: float
    """When the first file was written, in seconds since the epoch."""
    last: float

    def command(self, *, complete: bool) -> list[str]:
        """Return PyTorch's command that compares the collectives of the ranks."""
        some = [] if complete else ["--allow-incomplete-ranks"]
        return ["torchfrtrace", "--prefix", PREFIX, *some, str(self.folder)]

    def silent(self, world_size: int) -> tuple[int, ...]:
        """Return the ranks of a job of this size that wrote nothing."""
        return tuple(sorted(set(range(world_size)) - set(self.ranks)))


def dumps(stage: Path) -> list[Dump]:
    """Return the dumps in the folder of a stage, the newest last."""
    folder = stage / FOLDER
    attempts = sorted(folder.iterdir()) if folder.is_dir() else []
    found = []
    for attempt in attempts:
        times = dict(_files(attempt)) if attempt.is_dir() else {}
        if times:
            first, last = min(times.values()), max(times.values())
            found.append(Dump(folder=attempt, ranks=tuple(sorted(times)), first=first, last=last))
    return sorted(found, key=lambda dump: dump.last)


def _files(attempt: Path) -> Iterator[tuple[int, float]]:
    """Yield the rank and the time of each file of an attempt."""
    for file in attempt.iterdir():
        named = _FILE.fullmatch(file.name)
        if named is not None and file.is_file():
            yield int(named[1]), file.stat().st_mtime
