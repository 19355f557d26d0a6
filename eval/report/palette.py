# SPDX-License-Identifier: Apache-2.0
"""The colours of the report, for light and for dark pages, and the line styles of its curves.

The colours of series differ for readers with any common colour blindness (a distance in CIELAB of
at least 24 between any two in the simulations of Machado and others, 2009), and each has a contrast
of at least 4.5:1 with its page.
"""

PALETTE = {
    "page": "#ffffff",
    "ink": "#1f2328",
    "muted": "#66707a",
    "rule": "#d5d9de",
    "series-0": "#4e65f5",
    "series-1": "#b85259",
    "series-2": "#dd0295",
    "series-3": "#3b0899",
    "series-4": "#568200",
    "series-5": "#5b2000",
}
DARK = {
    "page": "#14171b",
    "ink": "#e4e7eb",
    "muted": "#9aa4af",
    "rule": "#333a42",
    "series-0": "#07a3be",
    "series-1": "#ffda1c",
    "series-2": "#ad7aff",
    "series-3": "#d47f75",
    "series-4": "#f36d2e",
    "series-5": "#a8ff8f",
}
SERIES = [name for name in PALETTE if name.startswith("series-")]
LINES: tuple[str | tuple[float, tuple[float, ...]], ...] = ("solid", (0, (4, 1.2)), (0, (1, 0.8)))
"""Styles of the curves with the first, the second and the third round of the colours."""


def color(stage: int) -> str:
    """Return the colour of the stage at this index of the ladder."""
    return PALETTE[SERIES[stage % len(SERIES)]]


def line(stage: int) -> str | tuple[float, tuple[float, ...]]:
    """Return the line style of the stage at this index: curves of one colour differ in it."""
    return LINES[stage // len(SERIES) % len(LINES)]
