# SPDX-License-Identifier: Apache-2.0
"""Table of how each evaluation came about, and on which model and text."""

from collections.abc import Mapping, Sequence
from typing import Any

from eval.provenance import SHORT, Provenance
from eval.report.cells import MISSING, Cell, Row
from eval.report.evaluations import PARTS
from eval.run_folder import Evaluation

HEADS = (
    "evaluation", "date", "step", "parameters", "tokens seen", "rotation in effect", "tokenizer",
    "store", "seeds", "commit", "command",
)  # fmt: skip
"""Columns of `provenance_rows`, the first its name."""


def provenance_rows(evaluations: Sequence[Evaluation]) -> list[Row]:
    """Return a row for each evaluation; files of earlier versions state little of it."""
    return [Row(each.stage, [Cell(text) for text in _texts(each)]) for each in evaluations]


def _texts(evaluation: Evaluation) -> list[str]:
    about = evaluation.provenance or Provenance()
    return [
        _date(evaluation, about),
        _count(evaluation.step),
        _count(about.parameters),
        _count(about.tokens_seen),
        _rotation(about.rotation),
        about.tokenizer or MISSING,
        evaluation.store or MISSING,
        ", ".join(f"{name} {seed}" for name, seed in about.seeds.items()) or MISSING,
        about.short_commit or MISSING,
        about.command or MISSING,
    ]


def _date(evaluation: Evaluation, about: Provenance) -> str:
    """Return the date, and those of parts that were kept from an earlier evaluation."""
    kept = [f"{PARTS.get(name, name)}: {date}" for name, date in evaluation.kept.items()]
    return (about.date or MISSING) + (f" ({', '.join(kept)})" if kept else "")


def _rotation(found: Mapping[str, Any]) -> str:
    """Return the rotation that the built model was found to use."""
    wavelength, temperature = found.get("longest_wavelength"), found.get("temperature")
    if not isinstance(wavelength, int | float) or not isinstance(temperature, int | float):
        return MISSING
    sha256 = str(found.get("sha256", ""))[:SHORT]
    return f"longest wavelength {wavelength:,.0f}, temperature {temperature:.4g}, {sha256}"


def _count(number: int | None) -> str:
    return MISSING if number is None else f"{number:,}"
