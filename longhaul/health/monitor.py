# SPDX-License-Identifier: Apache-2.0
"""Metrics of a stage as they are written, and which findings begin and end with them; light."""

import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longhaul.health.checks import findings
from longhaul.health.thresholds import KEPT_LINES, QUIET_STEPS
from recipes.spec.finding import Finding

LOOKED_AT = frozenset(
    {
        "step", "loss", "lr", "grad_norm", "seq_length", "seconds", "data_wait_seconds",
        "longest_data_wait_seconds", "longest_data_wait_rank", "slow_ranks", "slow_gpus",
        "gpu_utilization", "host_private_bytes", "host_private_rank", "host_memory_bytes",
        "device_allocated_bytes", "device_allocated_rank",
    }
)  # fmt: skip
"""Keys that the checks read; of older lines only these are kept in memory."""
LARGEST_LINE = 2**24
"""Bytes after which a line that has no end is given up."""


class MetricsTail:
    """The newest lines of a metrics file that grows, is rewritten at a resume, or vanishes."""

    def __init__(self, path: Path) -> None:
        """Take the file, which may not exist yet."""
        self.path = path
        self.lines: deque[dict[str, Any]] = deque(maxlen=KEPT_LINES)
        self.last: dict[str, Any] = {}
        """The newest line with all its keys."""
        self.garbled = 0
        """Lines with bytes that a run never writes; one that was cut at a kill is none of them."""
        self._file: tuple[int, int] | None = None
        self._read = 0

    def poll(self) -> list[dict[str, Any]]:
        """Read what was written since the last call, and return the new lines.

        A file that is not there has none; one that was rewritten is read from its start. A line
        that is still being written is left for the next call.
        """
        try:
            with self.path.open("rb") as file:
                facts = os.fstat(file.fileno())
                here = facts.st_dev, facts.st_ino
                if here != self._file or facts.st_size < self._read:
                    self._file, self._read, self.garbled = here, 0, 0
                    self.lines.clear()
                file.seek(self._read)
                content = file.read()
        except OSError:
            return []
        end = content.rfind(b"\n") + 1
        if not end and len(content) > LARGEST_LINE:
            end = len(content)
        self._read += end
        parts = content[:end].split(b"\n")
        new = [line for part in parts if (line := _line(part)) is not None]
        self.garbled += sum(map(is_garbled, parts))
        for line in new:
            if self.lines and line["step"] <= self.lines[-1]["step"]:  # steps that are taken again
                kept = [one for one in self.lines if one["step"] < line["step"]]
                self.lines.clear()
                self.lines.extend(kept)
            self.lines.append({key: line[key] for key in line.keys() & LOOKED_AT})
        if new:
            self.last = new[-1]
        return new


def is_garbled(line: bytes) -> bool:
    """Tell whether a line has NULs or bytes that are not UTF-8."""
    try:
        line.decode()
    except UnicodeDecodeError:
        return True
    return b"\0" in line


def _line(text: bytes) -> dict[str, Any] | None:
    """Return a line with a step; None for one that is damaged."""
    try:
        content = json.loads(text)
    except ValueError:  # also for bytes that are not UTF-8
        return None
    step = content.get("step") if isinstance(content, dict) else None
    return content if isinstance(step, int) and not isinstance(step, bool) else None


class Monitor:
    """Findings that hold now, with the step from which each holds."""

    def __init__(self, started: int = 0) -> None:
        """Take the step that the process began from."""
        self.started = started
        self.current: dict[tuple[str, tuple[int, ...]], Finding] = {}
        self._seen: dict[tuple[str, tuple[int, ...]], int] = {}

    def check(self, lines: Sequence[Mapping[str, Any]]) -> tuple[list[Finding], list[Finding]]:
        """Return the findings that begin and those that end with the last of some lines."""
        if not lines:
            return [], []
        step = lines[-1]["step"]
        begun = []
        for finding in findings(lines, self.started):
            if finding.key not in self.current:
                self.current[finding.key] = finding
                begun.append(finding)
            self._seen[finding.key] = step
        over = [key for key, last in self._seen.items() if step - last >= QUIET_STEPS]
        ended = []
        for key in over:
            del self._seen[key]
            ended.append(self.current.pop(key))
        return begun, ended
