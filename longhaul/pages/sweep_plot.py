# SPDX-License-Identifier: Apache-2.0
"""The plot of `longhaul plan --sweep --plot`: longest length, rate, and cost against time."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from data.files.whole import replacing
from eval.report.palette import PALETTE
from recipes.planner.search.sweep import Point, frontier
from recipes.spec.naming import budget_word, length_shown


def draw(path: Path, points: Sequence[Point]) -> None:
    """Write a PNG of a sweep. Raises ValueError if none of its points fits."""
    figure = picture(points)
    with replacing(path) as hidden:
        figure.savefig(hidden, format="png", dpi=150)


def picture(points: Sequence[Point]) -> Figure:
    """Return the figure; points that do not fit are missing in it."""
    fitting = [point for point in points if point.plan is not None]
    first = points[0].question
    if not fitting:
        raise ValueError(f"nothing fits {first.cluster.name} at any point of the sweep: no plot")
    figure = Figure(figsize=(14.4, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    longest, rate, cost = figure.subplots(1, 3)
    lengths = sorted({point.question.seq_length for point in fitting})
    gpus = sorted({point.question.gpus for point in fitting})

    reach = {
        of.question.gpus: of for of in sorted(fitting, key=lambda one: one.question.seq_length)
    }
    longest.plot(
        gpus, [reach[count].question.seq_length for count in gpus], marker="o",
        color=PALETTE["series-0"],
    )  # fmt: skip
    _doubling(longest, "y", lengths, map(length_shown, lengths))
    longest.set_ylim(lengths[0] / 1.5, lengths[-1] * 1.5)
    longest.set_ylabel("longest length of the sweep that fits")
    _doubling(longest, "x", gpus, map(str, gpus))
    longest.set_xlabel("GPUs")

    for at, count in enumerate(gpus):
        of = [point for point in fitting if point.question.gpus == count]
        rates = [point.plan.time.tokens_per_gpu_second * count for point in of if point.plan]
        rate.plot(
            [point.question.seq_length for point in of], rates, marker="o", markersize=3,
            color=_shade(at, gpus), label=f"{count:,} GPUs",
        )  # fmt: skip
    _doubling(rate, "x", lengths, map(length_shown, lengths))
    rate.set_yscale("log")
    rate.set_xlabel("tokens of a sequence")
    rate.set_ylabel("tokens/s of all GPUs")

    best = frontier(points)
    for at, length in enumerate(lengths):
        of = [point for point in fitting if point.question.seq_length == length]
        ends = sorted((point for point in best if point in of), key=lambda one: one.days)
        cost.scatter(
            [one.days for one in of], [one.gpu_hours for one in of], s=9,
            color=_shade(at, lengths), alpha=0.5,
        )  # fmt: skip
        cost.plot(
            [one.days for one in ends], [one.gpu_hours for one in ends], marker="o", markersize=4,
            color=_shade(at, lengths), label=length_shown(length),
        )  # fmt: skip
    cost.set_xscale("log")
    cost.set_yscale("log")
    cost.set_xlabel(f"days for {budget_word(points[0].tokens)} tokens")
    cost.set_ylabel("GPU-hours, with failures of nodes")
    for axes in (longest, rate, cost):
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (rate, cost):
        axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(
        f"{first.card.name} on {first.cluster.name}; lines of cost: no point beats them"
    )
    return figure


def _doubling(axes: Axes, of: str, at: Sequence[int], words: Iterable[str]) -> None:
    """Give an axis a scale of powers of two with these ticks."""
    (axes.set_xscale if of == "x" else axes.set_yscale)("log", base=2)
    axis = axes.xaxis if of == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(list(at)))
    axis.set_major_formatter(FixedFormatter(list(words)))
    axis.set_minor_locator(NullLocator())


def _shade(at: int, among: Sequence[int]) -> tuple[float, float, float, float]:
    return colormaps["viridis"](0.9 * at / max(1, len(among) - 1))
