# SPDX-License-Identifier: Apache-2.0
"""The results of a session, a line of JSON a case in one file; and results that are kept.

A line is written when its case ends, or has more to tell, and the last line of a case counts. So a
session that is cut short loses nothing but the case under way, and what comes back from a rented
machine is one file.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case
from data.files.whole import write_text

FILE, MARK = "results.jsonl", "under_way.json"
MEASURED = Path(__file__).parent / "measured"
"""Results that are kept: a file a case, in a folder a GPU."""


@dataclass(slots=True, kw_only=True)
class Result:
    """What was found of a case: figures, or the reason why there are none."""

    case: str
    kind: str
    settings: dict[str, Any]
    device: str
    """cuda, or cpu, whose figures mean nothing."""
    rental: str = ""
    """Of the machine and the time that it was held for: figures of two are not compared."""
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    disturbed: str = ""
    """Why the figures do not count, where something else used the GPU."""
    gpu: dict[str, float] = field(default_factory=dict)
    """Rates of the canary and free memory before the case, clocks and power during it."""
    seconds: float = 0.0
    """Of the case, its set-up included."""
    facts: dict[str, str] = field(default_factory=dict)
    """Date, machine, versions, commit."""

    @classmethod
    def of(cls, case: Case, device: str, **found: Any) -> "Result":
        """Return a result of a case."""
        return cls(
            case=case.name, device=device, kind=case.kind, settings=case.settings, **found
        )  # fmt: skip

    @property
    def counts(self) -> bool:
        """Whether there are figures, and they can be quoted."""
        return not self.reason and not self.disturbed


def folder_of(machine: str) -> str:
    """Return the name of the folder that keeps results of a machine's GPU."""
    gpu = machine.partition(",")[0]
    return "_".join("".join(c if c.isalnum() else " " for c in gpu.lower()).split())


def read_one(path: Path, text: str) -> Result:
    """Return a result; raise ValueError that names the file if it is not one."""
    try:
        return Result(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a result ({error}); delete it") from None


def kept(folder: Path = MEASURED) -> dict[str, Result]:
    """Return the results in a folder of files, by their cases."""
    found = [read_one(path, path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {one.case: one for one in found}


class Results:
    """The folder of a session."""

    def __init__(self, folder: Path) -> None:
        """Take the folder, and make it."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.mark = folder / FILE, folder / MARK
        if self.path.exists():
            text = self.path.read_bytes()
            os.truncate(self.path, text.rfind(b"\n") + 1)  # a session ended while it wrote a line

    def read(self) -> dict[str, Result]:
        """Return the last result of each case; raise ValueError for anything else.

        A last line without its end is left out: it is being written.
        """
        if not self.path.exists():
            return {}
        text = self.path.read_text()
        lines = text[: text.rfind("\n") + 1].splitlines()
        found = [read_one(self.path, line) for line in lines]
        return {one.case: one for one in found}

    def write(self, result: Result) -> None:
        """Append a result."""
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def forget(self, names: Iterable[str]) -> None:
        """Remove the results of some cases."""
        left = {name: one for name, one in self.read().items() if name not in set(names)}
        write_text(self.path, "".join(json.dumps(asdict(one)) + "\n" for one in left.values()))

    @contextmanager
    def begun(self, case: Case, limit: float) -> Iterator[None]:
        """Mark a case while it runs: its name, its process, its start and its limit in seconds."""
        mark = {"case": case.name, "process": os.getpid(), "start": time.time(), "limit": limit}
        write_text(self.mark, json.dumps(mark))
        yield
        self.mark.unlink()

    def under_way(self) -> dict[str, Any] | None:
        """Return the mark of the case that runs, or that a process ended in."""
        try:
            found: dict[str, Any] = json.loads(self.mark.read_text())
        except FileNotFoundError:
            return None
        return found

    def clear_mark(self) -> None:
        """Forget a case that a process ended in."""
        self.mark.unlink(missing_ok=True)
