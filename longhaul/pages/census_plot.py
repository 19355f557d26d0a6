# SPDX-License-Identifier: Apache-2.0
"""The plot of `longhaul census --png`: tokens by length, what is kept whole, and padding."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from data.census.census import Census
from data.files.whole import replacing
from eval.report.palette import PALETTE, SERIES, color
from recipes.spec.naming import length_shown


def draw(path: Path, counted: Census, store: str) -> None:
    """Write a PNG of a census."""
    figure = picture(counted, store)
    with replacing(path) as hidden:
        figure.savefig(hidden, format="png", dpi=150)


def picture(counted: Census, store: str) -> Figure:
    """Return the figure."""
    figure = Figure(figsize=(13.6, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    histogram, kept, padding = figure.subplots(1, 3)
    _histogram(histogram, counted)
    rows = counted.together.kept
    lengths = [length_shown(row.seq_length_tokens) for row in rows]
    for label, style, name, shade in (
        ("best-fit, tokens", "-", "best_fit_tokens", 1),
        ("best-fit, documents", "--", "best_fit_documents", 1),
        ("cut, tokens", "-", "cut_tokens", 0),
        ("cut, documents", "--", "cut_documents", 0),
    ):
        shares = [100 * getattr(row, name) for row in rows]
        kept.plot(lengths, shares, style, marker="o", markersize=3, color=color(shade), label=label)
    kept.set_ylim(0, 104)
    kept.set_ylabel("% kept whole")
    kept.legend(frameon=False, fontsize=7)
    packed = [100 * row.padding for row in counted.packed]
    padding.bar(lengths, packed, color=color(2), width=0.7, label="packed by best fit")
    least = [100 * row.least_padding for row in rows]
    padding.plot(
        lengths, least, "_", color=PALETTE["ink"], markersize=16, label="no packing avoids"
    )
    padding.set_ylabel("% of padding")
    padding.legend(frameon=False, fontsize=7)
    for axes in (kept, padding):
        axes.set_xlabel("tokens of a sequence")
    for axes in (histogram, kept, padding):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelrotation=60, labelsize=7)
    figure.suptitle(
        f"{store}: {counted.together.documents:,} documents, {counted.together.tokens:,} tokens",
        color=PALETTE["ink"],
    )
    return figure


def _histogram(axes: Axes, counted: Census) -> None:
    bounds = [bucket.at_least_tokens for bucket in counted.together.buckets]
    words = [length_shown(bound) for bound in bounds]
    below = [0.0] * len(bounds)
    total = counted.together.tokens
    named = counted.sources[: len(SERIES)]
    for at, source in enumerate(named):
        tokens = {bucket.at_least_tokens: bucket.tokens for bucket in source.buckets}
        heights = [100 * tokens.get(bound, 0) / total for bound in bounds]
        axes.bar(words, heights, bottom=below, color=color(at), width=0.8, label=source.name)
        below = [base + height for base, height in zip(below, heights, strict=True)]
    others = [
        100 * bucket.tokens / total - base
        for bucket, base in zip(counted.together.buckets, below, strict=True)
    ]
    if len(counted.sources) > len(named):
        axes.bar(
            words, others, bottom=below, color=PALETTE["rule"], width=0.8,
            label=f"{len(counted.sources) - len(named)} others",
        )  # fmt: skip
    axes.set_ylabel("% of the tokens")
    axes.set_xlabel("tokens of a document, from")
    if len(counted.sources) > 1:
        axes.legend(frameon=False, fontsize=7)
