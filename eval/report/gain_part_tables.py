# SPDX-License-Identifier: Apache-2.0
"""Table of the gain from context by source and by kind of token."""

from collections.abc import Sequence

from eval.measurements import LEAST_TOKENS, GainPart
from eval.report.cells import MISSING, PLUS_MINUS, Cell, Row, number
from eval.report.context_tables import measured
from eval.run_folder import Evaluation

PART_HEADS = ("evaluation", "tokens scored", "number", "fewest read", "whole window", "gain")
"""Columns of `part_rows`, the first its name."""


def part_rows(evaluations: Sequence[Evaluation]) -> list[Row]:
    """Return a row for each evaluation and part; the gain has its error over documents."""
    return [
        Row(each.name, [Cell(text) for text in _texts(part)])
        for each in measured(evaluations)
        if len(each.gain.contexts) > 1
        for part in each.gain.parts
    ]


def _texts(part: GainPart) -> tuple[str, ...]:
    name = f"of {part.name}" if part.kind == "source" else part.name
    if not part.loss:
        return name, f"{part.tokens:,}", MISSING, MISSING, f"fewer than {LEAST_TOKENS} tokens"
    error = number(part.gain_error, f" {PLUS_MINUS} {{:.3f}}", ", one document")
    return (
        name,
        f"{part.tokens:,}",
        f"{part.loss[0]:.3f}",
        f"{part.loss[-1]:.3f}",
        f"{part.gain:+.3f}{error}",
    )
