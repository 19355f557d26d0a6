# SPDX-License-Identifier: Apache-2.0
"""What was measured while a stage trained, over its steps: by quarter, by length, and a passkey."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.report import plots
from eval.report.cells import Cell, Row, number
from eval.report.curve_names import name_curve, spread
from eval.report.palette import color, line
from eval.run_folder import StageResults, Step
from recipes.spec.naming import length_shown

HEADS = ("step", "held-out loss", "passkey, nats per token", "share of the time")
TITLES = (
    "held-out loss by quarter of the window",
    "held-out loss by tokens of a document",
    "passkey, nats per token",
)

Curve = tuple[str, list[float]]
"""A name, and a value for each step; NaN if it was not measured."""


class WhileTraining(NamedTuple):
    """The section of the page: a figure for each stage, and a row of its last values."""

    figures: list[tuple[str, str]]
    rows: list[Row]
    heads: tuple[str, ...] = HEADS


def while_training(stages: Sequence[StageResults]) -> WhileTraining | None:
    """Return the section; None if no stage was evaluated while it trained."""
    evaluated = [(stage, steps) for stage in stages if (steps := _evaluated(stage))]
    if not evaluated:
        return None
    return WhileTraining(
        [(stage.name, _inline(stage.name, steps)) for stage, steps in evaluated],
        [_row(stage, steps) for stage, steps in evaluated],
    )


def over_steps(steps: Sequence[Step], *, narrow: bool = False) -> Figure:
    """Draw what was measured at some steps of a stage, three axes."""
    panels = panels_of(steps)
    if narrow:
        figure, drawn = plots.narrow_figure([], [2.0 for _ in panels])
    else:
        figure = plots.new_figure(3.4)
        drawn = [figure.add_axes((0.05 + 0.34 * at, 0.15, 0.215, 0.70)) for at in range(3)]
    taken = [step.step for step in steps]
    for axes, title, curves in zip(drawn, TITLES, panels, strict=True):
        for index, (_, values) in enumerate(curves):
            axes.plot(
                taken, values, color=color(index), linewidth=1.6, linestyle=line(index),
                marker="o", markersize=3 if len(taken) < 40 else 0,
            )  # fmt: skip
        ends = [(index, name, values[-1]) for index, (name, values) in enumerate(curves)]
        ends = [end for end in ends if math.isfinite(end[2])]
        heights = spread([value for _, _, value in ends], axes.get_ylim())
        for (index, name, _), height in zip(ends, heights, strict=True):
            name_curve(axes, name, (taken[-1], height), index, 8)
        if narrow:  # room for the names
            box = axes.get_position()
            axes.set_position((box.x0, box.y0, box.width * 0.8, box.height))
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        plots.framed(axes, title)
    drawn[-1].set_xlabel("step")
    if not narrow:
        for axes in drawn[:-1]:
            axes.set_xlabel("step")
    return figure


def panels_of(steps: Sequence[Step]) -> list[list[Curve]]:
    """Return the curves by quarter, by length, and the passkey's."""
    quarters = max(len(step.heldout_by_quarter) for step in steps)
    lengths = sorted({length for step in steps for length in step.heldout_by_length}, key=int)
    return [
        [
            (f"{at + 1} of {quarters}", [_at(step.heldout_by_quarter, at) for step in steps])
            for at in range(quarters)
        ],
        [
            (length_shown(int(of)), [step.heldout_by_length.get(of, math.nan) for step in steps])
            for of in lengths
        ],
        [("", [step.passkey_nats for step in steps])],
    ]


def _inline(name: str, steps: Sequence[Step]) -> str:
    drawn = plots.inline_pair(
        lambda narrow: over_steps(steps, narrow=narrow),
        f"{name} while it trained, by step: held-out loss by quarter of the window and by tokens "
        "of a document, and loss of a passkey's answer",
    )
    return drawn or ""


def _at(values: Sequence[float], place: int) -> float:
    return values[place] if place < len(values) else math.nan


def _evaluated(stage: StageResults) -> list[Step]:
    return [step for step in stage.steps if step.is_evaluated]


def _row(stage: StageResults, steps: Sequence[Step]) -> Row:
    """Return the last values, and the time of all evaluations over that of all steps."""
    last = steps[-1]
    spent = sum(step.evaluation_seconds for step in steps)
    share = spent / trained if (trained := sum(step.seconds for step in stage.steps)) else math.nan
    texts = (
        f"{last.step:,}",
        number(last.heldout_loss, "{:.3f}"),
        number(last.passkey_nats, "{:.2f}"),
        number(share, "{:.2%}"),
    )
    return Row(stage.name, [Cell(text) for text in texts])
