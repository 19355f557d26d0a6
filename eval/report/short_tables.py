# SPDX-License-Identifier: Apache-2.0
"""The price at short length: the loss of whole short documents, and its change between stages."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from eval.measurements import ShortLoss
from eval.report.cells import PLUS_MINUS, Cell, Row, number
from eval.report.gains import pairs
from eval.run_folder import Evaluation
from eval.uncertainty import standard_error

SHORT_HEADS = ("documents", "tokens at most", "nats per token", "of all tokens")


class Change(NamedTuple):
    """By how much the loss of the same short documents is higher after than before."""

    after: str
    before: str
    difference: float
    standard_error: float


def short_changes(evaluations: Sequence[Evaluation]) -> list[Change]:
    """Return how each stage differs from its base models and from the stage before it."""
    stages = [each for each in evaluations if each.base is None]
    found = []
    for before, after in (*pairs(evaluations), *pairwise(stages)):
        apart = short_difference(before, after)
        if apart:
            change = sum(apart) / len(apart)
            found.append(Change(after.stage, before.stage, change, standard_error(apart)))
    return found


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


def short_sentence(before: Evaluation, after: Evaluation) -> list[str]:
    """Return the change between two evaluations as a sentence; none for other documents."""
    apart = short_difference(before, after)
    if not apart:
        return []
    change = sum(apart) / len(apart)
    return [_sentence(Change(after.stage, before.stage, change, standard_error(apart)))]


def short_sentences(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return a sentence for each of `short_changes`; within two standard errors it is no change."""
    return [_sentence(each) for each in short_changes(evaluations)]


def _sentence(change: Change) -> str:
    said = f"{change.after}: the loss of short documents is {change.difference:+.3f}"
    if math.isnan(change.standard_error):
        return f"{said} nats from {change.before}, on one document."
    said = f"{said} +- {change.standard_error:.3f} nats from {change.before}, document by document"
    within = abs(change.difference) <= 2 * change.standard_error
    return f"{said}{': within two standard errors, so no change is shown' if within else ''}."
