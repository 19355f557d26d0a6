# SPDX-License-Identifier: Apache-2.0
"""Names of curves in figures, written next to their ends."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.offsetbox import AnnotationBbox, DrawingArea

from eval.report.palette import color, line

NAME_CHARACTERS = 24
SAMPLE_POINTS = 20
"""Length of a sample of a line before the name of its curve."""


def spread(heights: Sequence[float], limits: tuple[float, float]) -> list[float]:
    """Move heights apart until labels at them do not overlap, in order and within the limits."""
    low, high = limits
    gap = min(0.055, 1 / max(1, len(heights))) * (high - low)
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    # without the gaps below it, no height may be less than that of the label before: pool those
    pools: list[list[float]] = []
    for rank, i in enumerate(order):
        pools.append([heights[i] - rank * gap])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    level = [float(np.mean(pool)) for pool in pools for _ in pool]
    bottom, top = low + gap / 2, high - gap * (len(heights) - 0.5)
    placed = list(heights)
    for rank, i in enumerate(order):
        placed[i] = min(max(level[rank], bottom), top) + rank * gap
    return placed


def name_curve(axes: Axes, name: str, end: tuple[float, float], index: int, right: float) -> None:
    """Write the name of a curve in its color, `right` points to the right of its end.

    A sample of the line comes before the name of a curve that is not solid.
    """
    if line(index) != "solid":
        sample = DrawingArea(SAMPLE_POINTS, 4)
        sample.add_artist(
            Line2D(
                (0, SAMPLE_POINTS), (2, 2), color=color(index), linewidth=2, linestyle=line(index)
            )
        )
        axes.add_artist(
            AnnotationBbox(
                sample,
                end,
                xybox=(right, 0),
                boxcoords="offset points",
                box_alignment=(0, 0.5),
                frameon=False,
                pad=0,
                annotation_clip=False,
            )
        )
        right += SAMPLE_POINTS + 5
    axes.annotate(
        clipped(name),
        end,
        xytext=(right, 0),
        textcoords="offset points",
        va="center",
        color=color(index),
        weight="bold",
        annotation_clip=False,
        parse_math=False,
    )


def clipped(name: str) -> str:
    """Return a name short enough for a label: its ends, which tell runs and stages apart."""
    end = NAME_CHARACTERS // 2
    cut = f"{name[: NAME_CHARACTERS - 3 - end]}...{name[-end:]}"
    return name if len(name) <= NAME_CHARACTERS else cut
