# SPDX-License-Identifier: Apache-2.0
"""Differences of the loss between stages on the same documents, with standard errors."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from eval.measurements import BaseRecord
from eval.report.evaluations import Settings, range_bounds
from eval.run_folder import (
    Evaluation,
)
from eval.uncertainty import standard_error


class Gain(NamedTuple):
    """Difference of two evaluations in a range of positions, over the same documents."""

    start: int
    stop: int
    difference: float
    standard_error: float


def gains(before: Evaluation, after: Evaluation) -> list[Gain]:
    """Return by how much the loss is higher after than before, in each range that both measured.

    The standard error is that of the mean difference of a document, which is less than that of
    either mean, since documents differ more than models do. Empty for other settings.
    """
    if not Settings.of(before).same_as(Settings.of(after)):
        return []
    earlier = {(mean.start, mean.stop): mean for mean in before.ranges}
    found = []
    for mean in after.ranges:
        other = earlier.get((mean.start, mean.stop))
        if other is None or not mean.by_document:
            continue
        if len(mean.by_document) != len(other.by_document):  # a file that was changed
            continue
        of_documents = zip(mean.by_document, other.by_document, strict=True)
        error = standard_error([late - early for late, early in of_documents])
        found.append(Gain(mean.start, mean.stop, mean.loss - other.loss, error))
    return found


class DifferenceRow(NamedTuple):
    """Differences of two evaluations on the same documents, one for each of the `range_bounds`."""

    name: str
    gains: list[Gain | None]


def difference_rows(evaluations: Sequence[Evaluation]) -> list[DifferenceRow]:
    """Return how each stage differs from the one before it, and from the base models.

    Empty if no two have the losses of the same documents.
    """
    stages = [each for each in evaluations if each.base is None]
    bounds = range_bounds(evaluations)
    rows = []
    for before, after in (*pairs(evaluations), *pairwise(stages)):
        if found := gains(before, after):
            rows.append(difference_row(f"{after.stage} minus {before.stage}", found, bounds))
    return rows


def difference_row(
    name: str, found: Sequence[Gain], bounds: Sequence[tuple[int, int]]
) -> DifferenceRow:
    """Return a row with each difference in the column of its range of positions."""
    measured = {(gain.start, gain.stop): gain for gain in found}
    return DifferenceRow(name, [measured.get(bound) for bound in bounds])


def difference_text(gain: Gain | None, sign: str = "+-") -> str:
    """Return a difference as text, with its standard error if it has one."""
    if gain is None or not math.isfinite(gain.difference):
        return "-"
    spread = f" {sign} {gain.standard_error:.3f}" if math.isfinite(gain.standard_error) else ""
    return f"{gain.difference:+.3f}{spread}"


def gain_sentences(evaluations: Sequence[Evaluation]) -> Iterator[str]:
    """Yield what each stage gained over the base model at the longest positions."""
    for base, stage in pairs(evaluations):
        found = gains(base, stage)
        if found:
            yield gain_sentence(base, stage, found[-1])


def pairs(evaluations: Sequence[Evaluation]) -> Iterator[tuple[Evaluation, Evaluation]]:
    """Yield each stage with the base model: with its own rotation, and with that of the stage."""
    for stage in evaluations:
        for base in evaluations if stage.base is None else ():
            if base.base is not None and stage.stage in (base.base.stages or (stage.stage,)):
                yield base, stage


def last_sentence(stages: Sequence[Evaluation]) -> str | None:
    """Return the difference of the last stage from the first at the longest positions.

    None if they do not have the losses of the same documents.
    """
    found = gains(stages[0], stages[-1])
    return gain_sentence(stages[0], stages[-1], found[-1]) if found else None


def gain_sentence(base: Evaluation, stage: Evaluation, gain: Gain) -> str:
    """Return one gain as a sentence; within two standard errors it is called none."""
    place = f"At positions {gain.start:,}-{gain.stop:,}"
    change, error = gain.difference, gain.standard_error
    if math.isnan(error):
        how = f"{abs(change):.3f} nats {'below' if change < 0 else 'above'}"
        return f"{place} the loss of {stage.stage} is {how} that of {base.stage}, on one document."
    within = abs(change) <= 2 * error
    how = f"{abs(change):.3f} +- {error:.3f} nats {'below' if change < 0 else 'above'}"
    said = f"{place} the loss of {stage.stage} is {how} that of {base.stage}, document by document"
    return (
        f"{said}: within two standard errors, so no difference is shown." if within else f"{said}."
    )


def error_sentence(evaluations: Sequence[Evaluation]) -> Iterator[str]:
    """Yield the largest standard error of the mean losses, if any was measured."""
    errors = [
        mean.standard_error
        for each in evaluations
        for mean in each.ranges
        if math.isfinite(mean.standard_error)
    ]
    if errors:
        yield (
            "standard errors of these means, over documents: "
            f"{min(errors):.2f} to {max(errors):.2f}"
        )


def base_sentence(evaluation: Evaluation, base: BaseRecord) -> str:
    """Return what an evaluation of the base model is of."""
    rope = base.rope
    factor = f" factor {rope['factor']:g}" if "factor" in rope else ""
    return (
        f"{evaluation.stage}: the weights of {base.checkpoint}, not trained further, with RoPE "
        f"{rope.get('method')}{factor}, base {rope.get('base', math.nan):,.10g}"
    )
