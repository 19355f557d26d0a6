# SPDX-License-Identifier: Apache-2.0
"""The gain from context: a table, a figure and a sentence for each evaluation."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from eval.measurements import ContextGain
from eval.report.cells import MISSING, PLUS_MINUS, Cell, Row
from eval.report.curve_names import clipped, name_curve, spread
from eval.report.palette import SERIES, color, line
from eval.report.plots import framed, length_label, narrow_figure, new_figure, sample_width
from eval.run_folder import Evaluation, StageResults
from eval.uncertainty import standard_error


class Measured(NamedTuple):
    """An evaluation's name and its gain from context."""

    name: str
    gain: ContextGain


def measured(evaluations: Sequence[Evaluation]) -> list[Measured]:
    """Return those that measured the gain from context."""
    return [
        Measured(each.stage, each.context_gain)
        for each in evaluations
        if each.context_gain is not None
    ]


def scored_tokens(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the numbers of tokens that were scored, in rising order."""
    return [f"{count:,}" for count in sorted({each.gain.scored for each in measured(evaluations)})]


def context_heads(evaluations: Sequence[Evaluation]) -> list[int]:
    """Return the contexts that any evaluation measured, in rising order."""
    return sorted({context for each in measured(evaluations) for context in each.gain.contexts})


def context_rows(evaluations: Sequence[Evaluation]) -> list[Row]:
    """Return a row for each evaluation: the loss at each of `context_heads`."""
    heads = context_heads(evaluations)
    return [
        Row(name, [Cell(texts.get(head, MISSING)) for head in heads])
        for name, texts in ((each.name, _texts(each.gain)) for each in measured(evaluations))
    ]


def _texts(gain: ContextGain) -> dict[int, str]:
    return {
        context: f"{loss:.3f}" + (f" {PLUS_MINUS} {error:.3f}" if math.isfinite(error) else "")
        for context, loss, error in zip(gain.contexts, gain.loss, gain.standard_error, strict=True)
    }


def context_sentences(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return what the longer half of each window adds, with its error over documents."""
    return [
        _sentence(each.name, each.gain)
        for each in measured(evaluations)
        if len(each.gain.contexts) > 1
    ]


def _sentence(name: str, gain: ContextGain) -> str:
    shorter, whole = gain.contexts[-2:]
    changes = [row[-1] - row[-2] for row in gain.by_document]
    change, error = sum(changes) / len(changes), standard_error(changes)
    how = "lowers" if change < 0 else "raises"
    sentence = (
        f"{name}: reading {whole:,} tokens instead of {shorter:,} {how} the loss of the last "
        f"{gain.scored:,} by {abs(change):.3f}"
    )
    if math.isnan(error):
        return f"{sentence} nats, on one document."
    within = abs(change) <= 2 * error
    tail = "within two standard errors, so no difference is shown" if within else ""
    return f"{sentence} +- {error:.3f} nats{f': {tail}' if tail else ''}."


def shaded(curves: Sequence[object]) -> bool:
    """Return whether errors are drawn: the bands of many curves would hide each other."""
    return len(curves) <= len(SERIES)


def context_figure(stages: Sequence[StageResults], *, narrow: bool = False) -> Figure | None:
    """Draw the curves with one standard error; None if no stage has one."""
    curves = [
        (index, stage.name, stage.evaluation.context_gain)
        for index, stage in enumerate(stages)
        if stage.evaluation is not None and stage.evaluation.context_gain is not None
    ]
    if not curves:
        return None
    longest_name = max(len(clipped(name)) for _, name, _ in curves)
    if narrow:
        figure, (axes,) = narrow_figure([(index, name) for index, name, _ in curves], [2.2])
    else:
        figure = new_figure(max(3.8, 1.0 + 0.2 * len(curves)))
        beside = 0.0095 * longest_name + sample_width([index for index, _, _ in curves])
        axes = figure.add_axes((0.055, 0.14, 0.925 - beside, 0.76))
    for index, _, gain in curves:
        x, mean = np.array(gain.contexts), np.array(gain.loss)
        error = np.nan_to_num(np.array(gain.standard_error))
        axes.plot(
            x,
            mean,
            color=color(index),
            linewidth=2.0,
            linestyle=line(index),
            marker="o",
            markersize=4.0,
        )
        if shaded(curves):
            axes.fill_between(
                x, mean - error, mean + error, color=color(index), alpha=0.16, linewidth=0
            )
    ticks = sorted({context for _, _, gain in curves for context in gain.contexts})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(
        FixedLocator(ticks[:: math.ceil(len(ticks) / (5 if narrow else 10))])
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: length_label(value)))
    ends = spread([gain.loss[-1] for _, _, gain in curves], axes.get_ylim())
    for (index, name, gain), height in zip(() if narrow else curves, ends, strict=not narrow):
        name_curve(axes, name, (gain.contexts[-1], height), index, right=12)
    axes.set_xlabel(
        "tokens that are read (log scale)"
        if narrow
        else "tokens that are read, the scored ones among them (log scale)"
    )
    framed(axes, "loss of the last tokens, nats per token")
    return figure
