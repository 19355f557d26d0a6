# SPDX-License-Identifier: Apache-2.0
"""A finding about the health of a run, and the file that findings are recorded in; light.

`stages/NAME/health.jsonl` has a line when a finding begins and one when it ends:

    {"time": 1780000000.0, "state": "begins", "step": 812, "kind": "straggler", "said": "...",
     "cause": "...", "remedy": "...", "ranks": [3]}
    {"time": 1780000900.0, "state": "ends", "step": 930, "kind": "straggler", "said": "..."}

`time` is the clock's; durations are never computed from it. A finding that is an event, such as a
loss that is not finite, has no line for its end.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "health.jsonl"
EVENTS = frozenset({"not_finite", "failed_save", "disk_full", "folder_lost", "failed", "hang"})
"""Kinds that happen at one moment; those of a run that ended with it say why it ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What is wrong, since which step, why that is likely, and what to do."""

    kind: str
    step: int
    said: str
    cause: str = ""
    remedy: str = ""
    ranks: tuple[int, ...] = ()
    documents: tuple[Mapping[str, Any], ...] = ()

    def content(self) -> dict[str, Any]:
        """Return its fields as JSON has them; ranks and documents only where there are some."""
        content: dict[str, Any] = {
            "step": self.step, "kind": self.kind, "said": self.said, "cause": self.cause,
            "remedy": self.remedy,
        }  # fmt: skip
        if self.ranks:
            content["ranks"] = list(self.ranks)
        if self.documents:
            content["documents"] = [dict(document) for document in self.documents]
        return content

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Finding":
        """Return the finding of a line; raise ValueError or TypeError for one that is malformed."""
        if not isinstance(content.get("kind"), str):
            raise ValueError("a finding names its kind")
        return cls(
            kind=content["kind"],
            step=int(content.get("step") or 0),
            said=str(content.get("said", "")),
            cause=str(content.get("cause", "")),
            remedy=str(content.get("remedy", "")),
            ranks=tuple(map(int, content.get("ranks") or ())),
            documents=tuple(content.get("documents") or ()),
        )

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """What tells it from other findings: its kind, the tracker it is of, and its ranks."""
        of = self.said.partition(" ")[0] if self.kind == "tracker_down" else ""
        return f"{self.kind} {of}".rstrip(), self.ranks


def begins(finding: Finding) -> dict[str, Any]:
    """Return the line of a finding that begins now."""
    return {"time": time.time(), "state": "begins", **finding.content()}


def ends(finding: Finding, step: int) -> dict[str, Any]:
    """Return the line of a finding that has ended by a step."""
    line = {"time": time.time(), "state": "ends", "step": step, "kind": finding.kind}
    line["said"] = f"ended; it began at step {finding.step}"
    return line if not finding.ranks else {**line, "ranks": list(finding.ranks)}


def append(folder: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Append lines to the record in the folder of a stage, below one that was cut at a kill."""
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    if not text:
        return
    with (folder / FILE).open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else b"\n" + text
        file.write(text)


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the record in the folder of a stage; a damaged line is left out."""
    try:
        text = (folder / FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return _lines_of(text)


class RecordTail:
    """The lines that are appended to the record in the folder of a stage from now on."""

    def __init__(self, folder: Path) -> None:
        """Take the folder, which may not exist yet; what its record has now is left out."""
        self.path = folder / FILE
        self._read = self._size()

    def poll(self) -> list[dict[str, Any]]:
        """Return the whole lines since the last call; none while the file cannot be read."""
        size = self._size()
        if size <= self._read:  # a record is only shortened by hand
            return []
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                content = file.read()
        except OSError:
            return []
        end = content.rfind(b"\n") + 1
        self._read += end
        return _lines_of(content[:end].decode(errors="replace"))

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


def _lines_of(text: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict) and isinstance(content.get("kind"), str):
            found.append(content)
    return found


def recorded(lines: Sequence[Mapping[str, Any]]) -> tuple[list[Finding], list[Finding]]:
    """Return the findings of a record that have not ended, and those that have or are events."""
    current: dict[tuple[str, tuple[int, ...]], Finding] = {}
    past: list[Finding] = []
    for line in lines:
        try:
            finding = Finding.of(line)
        except (TypeError, ValueError):
            continue
        if line.get("state") == "ends":
            if (begun := current.pop(finding.key, None)) is not None:
                past.append(begun)
        elif finding.kind in EVENTS:
            past.append(finding)
        else:
            current[finding.key] = finding
    return list(current.values()), past
