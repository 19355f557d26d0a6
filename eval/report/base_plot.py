# SPDX-License-Identifier: Apache-2.0
"""Draw stages next to the base model: loss by range of positions, and the passkeys found."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from eval.measurements import Passkey, RangeMean
from eval.report.curve_names import clipped, name_curve, spread
from eval.report.palette import PALETTE, color, line
from eval.report.plots import WIDTH_INCHES, framed, narrow_figure, new_figure
from eval.run_folder import (
    Evaluation,
    StageResults,
)
from recipes.spec.naming import length_shown

GAP = 0.05
"""Around a cell of the passkey grid, whose side is 1."""
ROW_INCHES = 0.22

Curve = tuple[int, Evaluation, list[RangeMean]]


def against_base(
    stages: Sequence[StageResults], first: int = 0, *, narrow: bool = False
) -> Figure | None:
    """Draw the base model and the stages; None without an evaluation of the base model.

    Colours are those from `first` on. A narrow figure has the losses alone.
    """
    every = [
        (index, stage.evaluation, [mean for mean in stage.evaluation.ranges if _finite(mean)])
        for index, stage in enumerate(stages, first)
        if stage.evaluation is not None
    ]
    curves = [curve for curve in every if curve[2]]
    if not any(evaluation.base is not None for _, evaluation, _ in curves):
        return None
    if narrow:
        names = [(index, evaluation.stage) for index, evaluation, _ in curves]
        figure, (axes,) = narrow_figure(names, [2.4])
        _losses(axes, curves, named=False)
        return figure
    grids = [
        (index, evaluation, evaluation.passkey)
        for index, evaluation, _ in curves
        if evaluation.passkey is not None
    ]
    rows = sum(len(grid.depths) for _, _, grid in grids)
    figure = new_figure(max(4.4, 1.0 + ROW_INCHES * rows))
    _losses(figure.add_axes((0.055, 0.13, 0.44 if grids else 0.72, 0.76)), curves, named=not grids)
    if grids:
        _passkeys(figure.add_axes((0.73, 0.13, 0.22, 0.76)), grids)
    return figure


def _losses(axes: Axes, curves: Sequence[Curve], *, named: bool) -> None:
    """Draw the mean of each range near its middle, with its standard error."""
    last = max(mean.stop for _, _, means in curves for mean in means)
    for order, (index, _, means) in enumerate(curves):
        aside = (order - (len(curves) - 1) / 2) * last / 120  # bars side by side
        axes.errorbar(
            [(mean.start + mean.stop) / 2 + aside for mean in means],
            [mean.loss for mean in means],
            yerr=[mean.standard_error for mean in means],
            color=color(index),
            linewidth=2.0,
            linestyle=line(index),
            elinewidth=1.0,
            capsize=3.0,
            marker="o",
            markersize=4.0,
        )
    axes.set_xlim(0, last)
    bounds = sorted({0, *(mean.stop for _, _, means in curves for mean in means)})
    axes.xaxis.set_major_locator(FixedLocator(bounds))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: length_shown(round(value))))
    context = next(each.seq_length for _, each, _ in curves if each.base is not None)
    if context < last:
        axes.axvline(context, color=PALETTE["muted"], linewidth=1.0, linestyle=(0, (2, 3)))
        near_left = context < 0.6 * last
        above = near_left or not named  # the name of the y axis is at the left: write it above that
        axes.annotate(
            f"the base model's {length_shown(context)}",
            (context, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 19 if above else 5),
            textcoords="offset points",
            ha="left" if near_left else "right",
            color=PALETTE["muted"],
        )
    axes.set_xlabel("position in the window, tokens")
    framed(axes, "loss, nats per token")
    if not named:
        return
    ends = spread([means[-1].loss for _, _, means in curves], axes.get_ylim())
    for (index, evaluation, means), height in zip(curves, ends, strict=True):
        right = (last - (means[-1].start + means[-1].stop) / 2) / last
        points = right * axes.get_position().width * WIDTH_INCHES * 72
        end = (means[-1].start + means[-1].stop) / 2
        name_curve(axes, evaluation.stage, (end, height), index, points + 8)


def _passkeys(axes: Axes, grids: Sequence[tuple[int, Evaluation, Passkey]]) -> None:
    """Draw a cell for each prompt length and depth, a block of rows for each evaluation."""
    lengths = sorted({length for _, _, grid in grids for length in grid.lengths})
    top = 0.0
    for index, evaluation, grid in grids:
        for row, depth in enumerate(grid.depths):
            for length, shares in zip(grid.lengths, grid.hits, strict=True):
                corner = (lengths.index(length) + GAP, top - row - 1 + GAP)
                _cell(axes, corner, shares[row], grid.trials, color(index))
            axes.annotate(
                f"{depth:.0%}",
                (len(lengths), top - row - 0.5),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color=PALETTE["muted"],
                annotation_clip=False,
            )
        axes.annotate(
            clipped(evaluation.stage),
            (0, top - len(grid.depths) / 2),
            xytext=(-8, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            color=color(index),
            weight="bold",
            annotation_clip=False,
            parse_math=False,
        )
        top -= len(grid.depths) + 3 * GAP
    axes.set_xlim(0, len(lengths))
    axes.set_ylim(top + 3 * GAP, 0)
    axes.yaxis.set_major_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator([column + 0.5 for column in range(len(lengths))]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: length_shown(lengths[int(at)])))
    axes.set_xlabel("length of the prompt, tokens")
    framed(axes, "passkeys found, by depth", grid=False)


def _cell(axes: Axes, corner: tuple[float, float], share: float, trials: int, hue: str) -> None:
    """Draw the share of the prompts of a cell that were answered exactly."""
    size = 1 - 2 * GAP
    most = share > 0.5
    strength = 0.8 + 0.2 * share if most else 0.6 * share  # the text is readable on either
    for fill, alpha in ((PALETTE["rule"], 1.0), (hue, strength)):
        axes.add_patch(Rectangle(corner, size, size, color=fill, alpha=alpha, linewidth=0))
    axes.annotate(
        f"{round(share * trials)}/{trials}",
        (corner[0] + size / 2, corner[1] + size / 2),
        ha="center",
        va="center",
        color=PALETTE["page" if most else "ink"],
    )


def _finite(mean: RangeMean) -> bool:
    return math.isfinite(mean.loss)
