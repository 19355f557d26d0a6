# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of a report: loss by position, and the training curves.

A figure is drawn once, in the light palette. `inline_svg` keeps text as text and turns each colour
of `PALETTE` into a CSS variable of the same name, which the page redefines for dark mode.
A page has each figure twice, once drawn for a narrow screen, with the names of curves below it.
`standalone` keeps the colours and turns text into outlines, for use outside of the page.
"""

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from eval.report.curve_names import SAMPLE_POINTS, clipped, name_curve, spread
from eval.report.curves import Floats, bins, position_curve, training_curve
from eval.report.palette import PALETTE, color, line
from eval.run_folder import Evaluation, StageResults

WIDTH_INCHES = 10.4
NARROW_INCHES = 3.75
"""Width for a screen of 390 px, where text keeps its size."""
NAME_INCHES = 0.19

Kind = Literal["svg", "png"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def by_position(stages: Sequence[StageResults], *, narrow: bool = False) -> Figure | None:
    """Draw the loss by position of every evaluated stage, or return None if there is none."""
    curves = [
        (index, stage, stage.evaluation)
        for index, stage in enumerate(stages)
        if stage.evaluation is not None and stage.evaluation.by_position is not None
    ]
    drawn = [(index, stage.name, *position_curve(found)[:2]) for index, stage, found in curves]
    drawn = [curve for curve in drawn if curve[2].size]
    if not drawn:
        return None
    longest_name = max(len(clipped(name)) for _, name, _, _ in drawn)
    if narrow:
        figure, (axes,) = narrow_figure([(index, name) for index, name, _, _ in drawn], [2.4])
    else:
        figure = new_figure(4.6)
        beside = 0.0095 * longest_name + sample_width([index for index, _, _ in curves])
        axes = figure.add_axes((0.055, 0.115, 0.925 - beside, 0.80))
    for index, _, found in curves:
        x, y = bins(found, coarse=False)
        axes.plot(x, y, color=color(index), linewidth=0.7, alpha=0.3)
    for index, _, x, y in drawn:
        axes.plot(
            x, y, color=color(index), linewidth=2.0, linestyle=line(index), solid_capstyle="round"
        )
    for index, _, found in curves:
        _standard_errors(axes, found, color(index))
    first = min(float(x[0]) for _, _, x, _ in drawn)
    last = max(found.eval_length for _, _, found in curves)
    axes.set_xscale("log", base=2)
    axes.set_xlim(first, last)
    _position_ticks(axes, first, last, 5 if narrow else 10)
    _pad_losses(axes, [y for _, _, _, y in drawn])
    for index, _, found in curves:
        _length_line(axes, found.seq_length, index, narrow=narrow)
    ends = spread([float(y[-1]) for _, _, _, y in drawn], axes.get_ylim())
    for (index, name, x, _), height in zip(() if narrow else drawn, ends, strict=not narrow):
        right = max(8.0, _points_to_edge(axes, float(x[-1])) + 7.0)
        name_curve(axes, name, (float(x[-1]), height), index, right)
    axes.set_xlabel("position in the window, tokens (log scale)")
    framed(axes, "loss, nats per token")
    return figure


def training(
    stages: Sequence[StageResults], first: int = 0, *, narrow: bool = False
) -> Figure | None:
    """Draw loss and learning rate by tokens seen; colours from `first` on. None if untrained."""
    found = [(index, stage, training_curve(stage)) for index, stage in enumerate(stages, first)]
    curves = [(index, stage, curve) for index, stage, curve in found if curve is not None]
    if not curves:
        return None
    if narrow:
        names = [(index, stage.name) for index, stage, _ in curves]
        figure, (losses, rates) = narrow_figure(names, [2.1, 0.7])
        rates.sharex(losses)
    else:
        figure = new_figure(4.9)
        losses = figure.add_axes((0.055, 0.40, 0.925, 0.53))
        rates = figure.add_axes((0.055, 0.10, 0.925, 0.19), sharex=losses)
    total = float(sum(curve.tokens[-1] for _, _, curve in curves))
    start = 0.0
    for order, (index, stage, curve) in enumerate(curves):
        x = start + curve.tokens
        losses.plot(x, curve.loss, color=color(index), linewidth=0.7, alpha=0.35)
        losses.plot(x, curve.median_loss, color=color(index), linewidth=1.8, linestyle=line(index))
        rates.plot(x, curve.lr, color=color(index), linewidth=1.5, linestyle=line(index))
        stop = start + float(curve.tokens[-1])
        if order:
            for axes in (losses, rates):
                axes.axvline(start, color=PALETTE["muted"], linewidth=0.8, linestyle=(0, (2, 3)))
        start, begin = stop, start
        if narrow:
            continue
        crowded = len(clipped(stage.name)) * 0.011 > (stop - begin) / total
        losses.annotate(
            clipped(stage.name),
            ((begin + stop) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4 + (12 if crowded and order % 2 else 0)),
            textcoords="offset points",
            ha="center",
            color=color(index),
            weight="bold",
            parse_math=False,
        )
    losses.set_xlim(0, start)
    _pad_losses(losses, [curve.median_loss for _, _, curve in curves])
    losses.tick_params(labelbottom=False)
    rates.set_ylim(bottom=0)
    rates.yaxis.set_major_locator(MaxNLocator(3))
    if narrow:
        rates.xaxis.set_major_locator(MaxNLocator(4))
    rates.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _count(value)))
    rates.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    rates.set_xlabel("tokens seen")
    framed(losses, "loss, nats per token")
    framed(rates, "learning rate")
    return figure


def inline_pair(draw: Callable[[bool], Figure | None], title: str) -> str | None:
    """Return a figure for a page, drawn broad and narrow; the page's style shows one of the two.

    Args:
        draw: Draws it, narrow if its argument is true; None if there is nothing to draw.
    """
    figures = (draw(False), draw(True))
    return (
        "".join(
            f'<div class="{name}">{inline_svg(figure, title)}</div>'
            for name, figure in zip(("broad", "narrow"), figures, strict=True)
            if figure is not None
        )
        or None
    )


def inline_svg(figure: Figure, title: str) -> str:
    """Return an SVG element for a page that defines the variables of `PALETTE`."""
    svg = _save(figure, "svg", fonttype="none", transparent=True).decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # nothing refers to them; two plots would repeat them
    svg = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", svg, count=1)
    for name, value in PALETTE.items():
        svg = svg.replace(value, f"var(--{name})")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1)


def standalone(figure: Figure, kind: Kind) -> bytes:
    """Return the content of an image file of the figure, on white."""
    return _save(figure, kind, fonttype="path", transparent=False)


def _save(figure: Figure, kind: str, *, fonttype: str, transparent: bool) -> bytes:
    target = io.BytesIO()
    # the salt and the missing date make the bytes depend on the data alone
    with matplotlib.rc_context({"svg.fonttype": fonttype, "svg.hashsalt": "longhaul"}):
        figure.savefig(
            target,
            format=kind,
            dpi=150,
            transparent=transparent,
            metadata={"Date": None} if kind == "svg" else {"Software": None},
        )
    return target.getvalue()


def new_figure(height: float) -> Figure:
    """Return an empty figure of the width of the page."""
    return Figure(figsize=(WIDTH_INCHES, height), facecolor="white")


def narrow_figure(
    names: Sequence[tuple[int, str]], heights: Sequence[float]
) -> tuple[Figure, list[Axes]]:
    """Return a narrow figure with axes of these heights in inches, and names of curves below."""
    gap, foot = 0.42, 0.5 + NAME_INCHES * len(names)
    whole = foot + sum(heights) + gap * len(heights)
    figure = Figure(figsize=(NARROW_INCHES, whole), facecolor="white")
    found, top = [], whole
    for height in heights:
        top -= gap + height
        found.append(figure.add_axes((0.125, top / whole, 0.845, height / whole)))
    for row, (index, name) in enumerate(names):
        place = (foot - 0.5 - NAME_INCHES * (row + 0.5)) / whole
        figure.add_artist(
            Line2D(
                (0.02, 0.09), (place, place), color=color(index), linewidth=2, linestyle=line(index)
            )
        )
        figure.text(
            0.11, place, name, color=color(index), weight="bold", va="center", parse_math=False
        )
    return figure, found


def framed(axes: Axes, text: str, *, grid: bool = True) -> None:
    """Write the name of the y axis horizontally above it, and simplify the frame."""
    axes.annotate(
        text,
        (0, 1),
        xycoords="axes fraction",
        xytext=(-30, 6),
        textcoords="offset points",
        color=PALETTE["muted"],
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(PALETTE["muted"])
    if grid:
        axes.grid(axis="y", color=PALETTE["rule"], linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(colors=PALETTE["muted"], which="both")
    axes.xaxis.label.set_color(PALETTE["muted"])
    for text_of_axes in (*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels()):
        text_of_axes.set_fontsize(9.5)
    axes.xaxis.label.set_fontsize(9.5)
    axes.tick_params(labelsize=9)


def _length_line(axes: Axes, length: int, stage: int, *, narrow: bool) -> None:
    left, right = axes.get_xlim()
    if not left < length <= right:
        return
    axes.axvline(
        length, color=color(stage), linewidth=1.1, linestyle=(0, (2, 3)), clip_on=False, zorder=1
    )
    at_edge = length > right / 2  # centred, the text would reach into the names of the curves
    axes.annotate(
        length_label(length) if narrow else f"trained at {length_label(length)}",
        (length, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right" if at_edge else "center",
        color=color(stage),
    )


def _position_ticks(axes: Axes, first: float, last: float, most: int) -> None:
    octaves = range(math.ceil(math.log2(first)), math.floor(math.log2(last)) + 1)
    stride = math.ceil(len(octaves) / most)
    ticks = [2.0**octave for octave in list(octaves)[::-1][::stride]]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: length_label(value)))


def _pad_losses(axes: Axes, curves: Sequence[Floats]) -> None:
    """Fit the y axis to the heavy lines; single bins and steps may lie outside."""
    values = np.concatenate(curves)
    values = values[np.isfinite(values)]
    if values.size:
        low, high = float(values.min()), float(values.max())
        margin = 0.08 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)


def _standard_errors(axes: Axes, evaluation: Evaluation, hue: str) -> None:
    """Shade one standard error over documents on each side of the mean, where it is known."""
    found = evaluation.by_position
    if found is None or found.bands is None:
        return
    middle = (np.array(found.bands.edges[:-1]) + np.array(found.bands.edges[1:])) / 2
    mean, error = np.array(found.bands.loss), np.array(found.bands.standard_error)
    if np.isfinite(error).any():
        axes.fill_between(middle, mean - error, mean + error, color=hue, alpha=0.16, linewidth=0)


def sample_width(indices: Sequence[int]) -> float:
    """Return the share of the width that samples of lines take before names, if there are any."""
    sampled = any(line(index) != "solid" for index in indices)
    return (SAMPLE_POINTS + 5) / 72 / WIDTH_INCHES if sampled else 0.0


def _points_to_edge(axes: Axes, x: float) -> float:
    left, right = axes.get_xlim()
    share = math.log(right / x) / math.log(right / left)
    return share * axes.get_position().width * WIDTH_INCHES * 72


def length_label(value: float) -> str:
    """Return a number of tokens as a tick shows it."""
    if value < 16_384 or value % 1024:
        return f"{value:,.0f}"
    return f"{value / 2**20:g}M" if value >= 2**20 else f"{value / 2**10:g}K"


def _count(value: float) -> str:
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"
