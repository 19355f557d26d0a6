# SPDX-License-Identifier: Apache-2.0
"""PyTorch's flight recorder: each rank's last collectives, written where a collective hangs.

When a collective of NCCL has waited longer than its timeout, that rank tells the others by the
job's store, and each writes a file before it is ended, also a rank that hangs outside of NCCL. All
ranks of an attempt write to the folder of their stage:

    stages/NAME/flight_recorder/5123.0_rank_7     job 5123, first attempt, rank 7

The monitor of a process's first group of NCCL writes them, so no group may be made and closed
before training (slurm/preflight/ranks/measurement.py). PyTorch renamed the settings while 2.9 was
made, of which the container has a snapshot: both names are set there, and from 2.10 on the new
ones, which warn beside the old.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

FOLDER = "flight_recorder"
ENTRIES = 2000
"""Collectives that a rank keeps; some hundred bytes each, on the host."""
RENAMED = "2.10"
_FILE = re.compile(r"(?P<attempt>.+)_rank_(?P<rank>\d+)")


def record_collectives(stage: Path) -> None:
    """Have this rank keep its last collectives, for its groups of NCCL that are made from now on.

    Variables that a user has set stay. What an earlier attempt of this name left for this rank
    goes, so that the files of a hang are of one attempt.
    """
    folder = stage / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    attempt = os.environ.get("TORCHELASTIC_RUN_ID") or "none"
    prefix = folder / f"{re.sub(r'[^A-Za-z0-9.-]', '-', attempt)}_rank_"
    Path(f"{prefix}{os.environ.get('RANK', '0')}").unlink(missing_ok=True)
    renamed = Version(version("torch")) >= Version(RENAMED)
    for names, value in (
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), str(ENTRIES)),
        (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), str(prefix)),
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    ):
        if not any(name in os.environ for name in names):
            os.environ.update(dict.fromkeys(names[: 1 if renamed else None], value))


@dataclass(frozen=True, kw_only=True, slots=True)
class Dump:
    """The files that the ranks of one attempt wrote."""

    folder: Path
    attempt: str
    ranks: tuple[int, ...]
    first: float
    """When the first file was written, in seconds since the epoch."""
    last: float

    @property
    def prefix(self) -> str:
        """What the names of the files begin with, before the number of the rank."""
        return f"{self.attempt}_rank_"

    def command(self, *, complete: bool) -> list[str]:
        """Return PyTorch's command that compares the collectives of the ranks."""
        some = [] if complete else ["--allow-incomplete-ranks"]
        return ["torchfrtrace", "--prefix", self.prefix, *some, str(self.folder)]

    def silent(self, world_size: int) -> tuple[int, ...]:
        """Return the ranks of a job of this size that wrote nothing."""
        return tuple(sorted(set(range(world_size)) - set(self.ranks)))


def dumps(stage: Path) -> list[Dump]:
    """Return the dumps in the folder of a stage, the newest last."""
    written: dict[str, dict[int, float]] = {}
    for attempt, rank, seconds in _files(stage / FOLDER):
        written.setdefault(attempt, {})[rank] = seconds
    found = [
        Dump(
            folder=stage / FOLDER,
            attempt=attempt,
            ranks=tuple(sorted(times)),
            first=min(times.values()),
            last=max(times.values()),
        )
        for attempt, times in written.items()
    ]
    return sorted(found, key=lambda dump: dump.last)


def _files(folder: Path) -> Iterator[tuple[str, int, float]]:
    for file in folder.iterdir() if folder.is_dir() else ():
        named = _FILE.fullmatch(file.name)
        if named is not None and file.is_file():
            yield named["attempt"], int(named["rank"]), file.stat().st_mtime
