# SPDX-License-Identifier: Apache-2.0
"""The numbers of a page, as JSON types: those of its tables and of its curves, not rounded."""

from collections.abc import Mapping, Sequence
from typing import Any

from eval.measurements import Passkey
from eval.report.curves import position_curve, training_curve
from eval.report.data_mix import MixAsRead
from eval.report.evaluations import in_words
from eval.report.gains import DifferenceRow
from eval.report.stage_tables import cost
from eval.ruler.results import RulerResult
from eval.run_folder import Evaluation, RunRecord, StageResults
from eval.suite_results import SuiteResult
from eval.uncertainty import share_interval

SENTENCES = (
    "verdict", "outdated", "trends", "bases", "gains", "context_sentences", "short_sentences",
)  # fmt: skip
"""Parts of a page that are sentences."""


def page_json(
    parts: Mapping[str, Any],
    *,
    compared: Sequence[StageResults],
    stages: Sequence[StageResults],
    others: Sequence[Evaluation],
    differences: Sequence[DifferenceRow],
    suites: Sequence[SuiteResult],
    ruler: Sequence[RulerResult],
    mix: MixAsRead | None,
) -> dict[str, Any]:
    """Return the numbers of a page; `parts` are those of its template.

    Evaluations are as in their files. NaN is null in the file that is written.
    """
    runs: Sequence[tuple[str, str, RunRecord]] = parts["runs"]
    every = [*(each.evaluation for each in compared if each.evaluation is not None), *others]
    return {
        "sentences": {name: parts[name] for name in SENTENCES},
        "runs": [{"label": label, "path": path, "record": record} for label, path, record in runs],
        "models": [_model(each, every) for each in compared],
        "other_evaluations": list(others),
        "differences": [
            {"name": row.name, "ranges": [gain._asdict() for gain in row.gains if gain is not None]}
            for row in differences
        ],
        "training": [_training(stage) for stage in stages],
        "suites": list(suites),
        "ruler": list(ruler),
        "data_mix": None if mix is None else mix.json,
    }


def _model(stage: StageResults, every: Sequence[Evaluation]) -> dict[str, Any]:
    """Return a stage or base model: its evaluation, and the curve of its loss by position."""
    found = stage.evaluation
    curve = None if found is None or found.by_position is None else position_curve(found)
    return {
        "name": stage.name,
        "settings": None if found is None else in_words(found, every),
        "evaluation": found,
        "by_position_curve": None
        if curve is None
        else {name: values.tolist() for name, values in curve._asdict().items()},
        "passkeys": [] if found is None or found.passkey is None else _passkeys(found.passkey),
    }


def _passkeys(grid: Passkey) -> list[dict[str, Any]]:
    """Return the passkeys found at each prompt length, with the 95% interval of their share."""
    rows = []
    for length, shares in zip(grid.lengths, grid.hits, strict=True):
        tried = grid.trials * len(grid.depths)
        found = sum(round(share * grid.trials) for share in shares if share == share)
        low, high = share_interval(found, tried)
        rows.append({"length": length, "found": found, "tried": tried, "low": low, "high": high})
    return rows


def _training(stage: StageResults) -> dict[str, Any]:
    """Return what a stage was trained with, what that cost, and its curves."""
    curve = training_curve(stage)
    return {
        "name": stage.name,
        "record": stage.record,
        "cost": cost(stage)._asdict() if stage.steps else None,
        "curve": None
        if curve is None
        else {name: values.tolist() for name, values in curve._asdict().items()},
    }
