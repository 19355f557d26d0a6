# SPDX-License-Identifier: Apache-2.0
"""Cells and rows of the report's tables, and numbers as their text."""

import math
from dataclasses import dataclass
from typing import Any

MISSING = "-"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


@dataclass(frozen=True)
class Cell:
    """A table cell: its text, whether to mark it, and its shade (0 to 1)."""

    text: str
    marked: bool = False
    shade: float = 0.0


@dataclass(frozen=True)
class Row:
    """A table row, named by a stage or a prompt length."""

    name: str
    cells: list[Cell]
    note: str = ""


def number(value: float, form: str, otherwise: str = MISSING) -> str:
    """Return a number as text, or what to show for NaN and infinity."""
    return form.format(value) if math.isfinite(value) else otherwise


def value_text(value: Any) -> str:
    """Return a value of a recipe as text."""
    if isinstance(value, float):
        return f"{value:,.10g}" if math.isfinite(value) else MISSING
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def shade(value: float) -> float:
    """Return the shade of a cell for a share, which may lie outside of 0 to 1."""
    return round(min(max(value, 0.0), 1.0), 3)
