# SPDX-License-Identifier: Apache-2.0
"""Recent pace of a stage, and the time left for the stage and for its ladder."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

TAIL_BYTES = 64 * 1024
"""Bytes of a metrics file that are read for its newest lines; a line has some 300."""
RECENT = 20
"""Newest steps, whose median is the pace."""


def last_lines(metrics: Path, count: int = RECENT) -> list[dict[str, Any]]:
    """Return the newest complete lines of a metrics file in order; none if there is no file."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return []
    found = []
    for line in lines[-count - 1 :]:
        if not line.endswith(b"\n"):
            continue
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict) and isinstance(content.get("step"), int):
            found.append(content)
    return found[-count:]


@dataclass(frozen=True)
class Pace:
    """Pace of the newest steps of a stage."""

    step: int
    seconds: float
    """Median over the newest steps; NaN if none records it."""

    @classmethod
    def of(cls, lines: Sequence[dict[str, Any]]) -> "Pace":
        """Return the pace of lines of metrics; the first step of a stage compiles kernels."""
        steady = [line for line in lines if line["step"] > 1] or lines
        seconds = [
            float(line["seconds"])
            for line in steady
            if isinstance(line.get("seconds"), int | float) and math.isfinite(line["seconds"])
        ]
        step = int(lines[-1]["step"]) if lines else 0
        return cls(step, median(seconds) if seconds else math.nan)

    def left(self, steps: int) -> float:
        """Return the seconds until a stage has that many steps; NaN if the pace is unknown."""
        missing = max(0, steps - self.step)
        return missing * self.seconds if missing else 0.0


@dataclass(frozen=True)
class Part:
    """A stage of a ladder: its steps, the tokens of one, and how fast it has been."""

    steps: int
    tokens_per_step: float
    """NaN if unknown."""
    pace: Pace


def ladder_left(parts: Sequence[Part]) -> float:
    """Return the seconds until all stages are done; NaN if no stage has a pace.

    A stage that has not started is assumed to read as many tokens per second as the last one that
    has; since its sequences are longer, it will take somewhat more time.
    """
    total, rate = 0.0, math.nan
    for part in parts:
        left = part.pace.left(part.steps)
        if math.isfinite(part.pace.seconds) and part.pace.seconds > 0:
            rate = part.tokens_per_step / part.pace.seconds
        if math.isnan(left):
            left = part.steps * part.tokens_per_step / rate
        total += left
    return total


def duration(seconds: float) -> str:
    """Return seconds as text: 40 s, 12 min, 3 h 05 min, 2 d 4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"
