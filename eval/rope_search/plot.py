# SPDX-License-Identifier: Apache-2.0
"""Plot rotations next to a model's own: wavelength and divisor of each pair."""

import math
from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from custom_modules.rope.frequency_report import FrequencyBands
from data.files.whole import replacing
from eval.report.palette import PALETTE, SERIES


def draw(
    path: Path, shown: Mapping[str, FrequencyBands], *, title: str, trained: int, length: int
) -> None:
    """Write the plot as PNG; the first of `shown` is the model's own rotation."""
    figure = Figure(figsize=(10.4, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    waves, divided = figure.subplots(1, 2)
    for at, (name, found) in enumerate(shown.items()):
        color = PALETTE["muted"] if at == 0 else PALETTE[SERIES[(at - 1) % len(SERIES)]]
        pairs = range(len(found.wavelengths))
        finite = [wave if math.isfinite(wave) else math.nan for wave in found.wavelengths]
        waves.plot(pairs, finite, color=color, label=name, linewidth=1.6)
        if at:
            divided.plot(pairs, found.divisors, color=color, label=name, linewidth=1.6)
    for axes, where in ((waves, ((trained, "trained"), (length, "looked at"))),
                        (divided, ((length / trained, "length / trained"),))):  # fmt: skip
        for value, word in where:
            axes.axhline(value, color=PALETTE["rule"], linewidth=1, zorder=0)
            axes.annotate(
                word, (0, value), textcoords="offset points", xytext=(2, 3),
                color=PALETTE["muted"], fontsize=8,
            )  # fmt: skip
        axes.set_xlabel("pair of dimensions")
        axes.spines[["top", "right"]].set_visible(False)
    waves.set_yscale("log")
    waves.set_ylabel("wavelength, tokens")
    divided.set_ylabel("frequency divided by")
    waves.legend(frameon=False)
    figure.suptitle(title)
    with replacing(path) as hidden:
        figure.savefig(hidden, format="png", dpi=150)
