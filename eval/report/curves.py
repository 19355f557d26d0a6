# SPDX-License-Identifier: Apache-2.0
"""The points that curves of a report are drawn through; `eval.report.page_json` states the same."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eval.run_folder import Evaluation, StageResults

BINS_PER_OCTAVE = 6
POINTS_PER_CURVE = 600
MEDIAN_SHARE = 20  # a running median spans 1/20 of its stage

Floats = NDArray[np.float64]


class PositionCurve(NamedTuple):
    """The heavy line of a loss by position; NaN where the error is not known."""

    position: Floats
    loss: Floats
    standard_error: Floats


class TrainingCurve(NamedTuple):
    """The lines of a stage's training, from its beginning on."""

    tokens: Floats
    loss: Floats
    median_loss: Floats
    lr: Floats


def position_curve(evaluation: Evaluation) -> PositionCurve:
    """Return the curve of an evaluation: its bands, or bins that are equal on a log axis."""
    x, y = bins(evaluation, coarse=True)
    found = evaluation.by_position
    errors = np.full(x.shape, math.nan)
    if found is not None and found.bands is not None:
        errors = np.array(found.bands.standard_error)[np.isfinite(np.array(found.bands.loss))]
    return PositionCurve(x, y, errors)


def training_curve(stage: StageResults) -> TrainingCurve | None:
    """Return the curves of a stage; None if it is untrained or the tokens of a step unknown."""
    seen = _tokens_seen(stage)
    if not seen.size:
        return None
    shown = _shown(len(seen))
    loss = np.array([step.loss for step in stage.steps])
    rate = np.array([step.lr for step in stage.steps])
    return TrainingCurve(seen[shown], loss[shown], _running_median(loss, shown), rate[shown])


def bins(evaluation: Evaluation, *, coarse: bool) -> tuple[Floats, Floats]:
    """Return middle and mean loss of each bin; coarse bins are bands, or equal on a log axis."""
    found = evaluation.by_position
    if found is None:
        return np.empty(0), np.empty(0)
    if coarse and found.bands is not None:
        edges, mean = np.array(found.bands.edges, dtype=float), np.array(found.bands.loss)
        measured = np.isfinite(mean)
        return ((edges[:-1] + edges[1:]) / 2)[measured], mean[measured]
    x, y = [], []
    start, weight, total = 0, 0.0, 0.0
    growth = 2.0 ** (1.0 / BINS_PER_OCTAVE)
    for i, (loss, tokens) in enumerate(zip(found.loss, found.tokens, strict=True)):
        if tokens and math.isfinite(loss):
            weight += tokens
            total += loss * tokens
        wide = found.edges[i + 1] >= growth * max(found.edges[start], 1)
        if not coarse or wide or i + 1 == len(found.loss):
            if weight:
                x.append((found.edges[start] + found.edges[i + 1]) / 2)
                y.append(total / weight)
            start, weight, total = i + 1, 0.0, 0.0
    return np.array(x), np.array(y)


def _tokens_seen(stage: StageResults) -> Floats:
    seen = np.cumsum(np.array(stage.step_tokens(), dtype=float))
    return seen if np.isfinite(seen).all() else np.empty(0)


def _shown(steps: int) -> NDArray[np.intp]:
    """Return the steps that a curve is drawn through, including the last."""
    stride = math.ceil(steps / POINTS_PER_CURVE)
    return np.unique(np.append(np.arange(0, steps, stride), steps - 1))


def _running_median(values: Floats, at: NDArray[np.intp]) -> Floats:
    reach = len(values) // MEDIAN_SHARE // 2
    windows = [values[max(0, i - reach) : i + reach + 1] for i in at]
    finite = [window[np.isfinite(window)] for window in windows]
    return np.array([np.median(window) if window.size else math.nan for window in finite])
