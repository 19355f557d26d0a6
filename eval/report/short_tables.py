# SPDX-License-Identifier: Apache-2.0
"""The price at short length: the loss of whole short documents, and its change between stages."""

import math
from collections.abc import Sequence
from itertools import pairwise

from eval.measurements import ShortLoss
from eval.report.cells import PLUS_MINUS, Cell, Row, number
from eval.report.gains import pairs
from eval.run_folder import Evaluation
from eval.uncertainty import standard_error

SHORT_HEADS = ("documents", "tokens at most", "nats per token", "of all tokens")


def short_difference(before: Evaluation, after: Evaluation) -> list[float]:
    """Return the change of each document's loss; empty if they did not read the same documents."""
    first, second = before.short, after.short
    if first is None or second is None or not before.store or before.store != after.store:
        return []
    if (first.length, first.tokens) != (second.length, second.tokens):
        return []
    return [late - early for early, late in zip(first.by_document, second.by_document, strict=True)]


def short_rows(evaluations: Sequence[Evaluation]) -> list[Row]:
    """Return a row of `SHORT_HEADS` for each evaluation that read short documents."""
    return [
        Row(each.stage, [Cell(text) for text in _texts(each.short)])
        for each in evaluations
        if each.short is not None
    ]


def _texts(short: ShortLoss) -> tuple[str, ...]:
    return (
        f"{len(short.tokens):,}",
        f"{short.length:,}",
        f"{short.loss:.3f}" + number(short.standard_error, f" {PLUS_MINUS} {{:.3f}}", ""),
        f"{short.token_loss:.3f}",
    )


def short_sentences(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return how each stage differs from its base models and from the stage before it."""
    stages = [each for each in evaluations if each.base is None]
    compared = (*pairs(evaluations), *pairwise(stages))
    return [said for before, after in compared for said in short_sentence(before, after)]


def short_sentence(before: Evaluation, after: Evaluation) -> list[str]:
    """Return the change between two evaluations as a sentence; none for other documents.

    A change within two standard errors is called none.
    """
    apart = short_difference(before, after)
    if not apart:
        return []
    change, error = sum(apart) / len(apart), standard_error(apart)
    said = f"{after.stage}: the loss of short documents is {change:+.3f}"
    if math.isnan(error):
        return [f"{said} nats from {before.stage}, on one document."]
    said = f"{said} +- {error:.3f} nats from {before.stage}, document by document"
    within = abs(change) <= 2 * error
    return [f"{said}{': within two standard errors, so no change is shown' if within else ''}."]
