# SPDX-License-Identifier: Apache-2.0
"""The results of a folder: one JSON file a case, and a mark while a case runs."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import USUAL_CONNECTIONS, Case
from data.files.whole import write_text

FILES, MARK = "results", ".started"


@dataclass(slots=True, kw_only=True)
class Result:
    """What was found of a case: figures, or the reason why there are none."""

    case: str
    kind: str
    settings: dict[str, Any]
    device: str
    """cuda, or cpu, whose figures mean nothing."""
    round: int = 1
    connections: str = USUAL_CONNECTIONS
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0
    """Of the case, its set-up included."""
    facts: dict[str, str] = field(default_factory=dict)
    """Date, machine, versions, commit."""

    @classmethod
    def of(cls, case: Case, device: str, **found: Any) -> "Result":
        """Return a result of a case."""
        return cls(
            case=case.name, device=device, kind=case.kind, settings=case.settings, round=case.round,
            connections=case.connections, **found,
        )  # fmt: skip


class Results:
    """The folder of a session."""

    def __init__(self, folder: Path) -> None:
        """Take the folder, and make it."""
        self.folder = folder
        self.files = folder / FILES
        self.files.mkdir(parents=True, exist_ok=True)

    def read(self) -> dict[str, Result]:
        """Return all by the names of their cases; raise ValueError for any other file."""
        found = {}
        for path in sorted(self.files.glob("*.json")):
            try:
                found[path.stem] = Result(**json.loads(path.read_text()))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path} is no result ({error}); delete it") from None
        return found

    def names(self) -> set[str]:
        """Return the cases that have a result, without reading them."""
        return {path.stem for path in self.files.glob("*.json")}

    def write(self, result: Result) -> None:
        """Write a result's file: all of it or nothing."""
        text = json.dumps(asdict(result), indent=1) + "\n"
        write_text(self.files / f"{result.case}.json", text)

    def forget(self, names: Iterable[str]) -> None:
        """Delete the files of the cases given."""
        for name in names:
            (self.files / f"{name}.json").unlink()

    @contextmanager
    def begun(self, case: Case) -> Iterator[None]:
        """Mark a case while it runs; the mark holds the number of the process."""
        mark = self.files / f"{case.name}{MARK}"
        write_text(mark, str(os.getpid()))
        yield
        mark.unlink()

    def under_way(self) -> tuple[str, float] | None:
        """Return the case that runs, or that a process ended in, and the moment that it began."""
        for mark in self.files.glob(f"*{MARK}"):
            try:
                return mark.name.removesuffix(MARK), mark.stat().st_mtime
            except FileNotFoundError:  # ended meanwhile
                continue
        return None

    def clear_marks(self) -> None:
        """Forget cases that a process ended in."""
        for mark in self.files.glob(f"*{MARK}"):
            mark.unlink()
