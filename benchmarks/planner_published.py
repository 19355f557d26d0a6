# SPDX-License-Identifier: Apache-2.0
"""The planner's bytes and rates compared with those that others have published, by family of stack.

    python -m benchmarks.planner_published

Claim: bytes of a peer's GPU are predicted within an eighth. Of rates nothing is claimed: the page
shows by which factor each family of stacks is off, apart for points that a number of the planner
was chosen by (`fitted`) and for the others.

Nothing is measured: the points (`benchmarks.published_points`) are read from the sources' pages,
and the planner's formulas take a moment.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from benchmarks.published_points import Point, bytes_of_peers, lengths_of_peers, rates

BOUND = 0.125
"""Of the published bytes, that the claim allows."""


def verdict(points: Sequence[Point]) -> str:
    """Return the widest ratios of bytes, and whether the claim holds."""
    ratios = [point.ratio for point in points]
    outside = [point.name for point in points if abs(point.ratio - 1) > BOUND]
    said = f"{len(points)} points, predicted over published {min(ratios):.2f} to {max(ratios):.2f}"
    return (
        f"{said}; all within an eighth." if not outside else f"{said}; off: {'; '.join(outside)}."
    )


def section(points: Sequence[Point]) -> str:
    """Return the table of some points."""
    rows = [
        [
            point.name,
            point.source,
            f"{point.published:,.1f}" if point.unit == "GiB" else f"{point.published:,.0f}",
            f"{point.predicted:,.1f}" if point.unit == "GiB" else f"{point.predicted:,.0f}",
            f"{point.ratio:.2f}",
            "fitted" if point.fitted else "outside",
        ]
        for point in points
    ]
    unit = points[0].unit
    return table(["point", "source", f"published {unit}", "predicted", "ratio", "kind"], rows)


def spread(points: Sequence[Point]) -> str:
    """Return the table of ratios by family and kind."""
    rows = []
    for family in dict.fromkeys(point.family for point in points):
        for fitted in (True, False):
            ratios = [p.ratio for p in points if (p.family, p.fitted) == (family, fitted)]
            if ratios:
                kind = "fitted" if fitted else "outside"
                figures = (min(ratios), statistics.median(ratios), max(ratios))
                rows.append([family, kind, str(len(ratios)), *(f"{one:.2f}" for one in figures)])
    return table(["family", "kind", "points", "lowest", "median", "highest"], rows)


def whole_page() -> str:
    """Return the page."""
    sizes, lengths, speeds = list(bytes_of_peers()), list(lengths_of_peers()), list(rates())
    return page(
        "Published bytes and rates, and the planner's",
        facts([]),
        [
            f"## Bytes of a GPU\n\n{verdict(sizes)}\n\n{section(sizes)}",
            "## Lengths that ran on 8 H100\n\nPublished is the whole GPU: they fitted, and how "
            f"much was left is not known.\n\n{section(lengths)}",
            "## Rates of a GPU\n\nIn bf16 unless FP8 is said, at the efficiencies of the cluster "
            f"files; by family:\n\n{spread(speeds)}\n\n{section(speeds)}",
        ],
    )


def main() -> None:
    """Print the page, and write it where asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner_published",
        description="The planner's bytes and rates compared with published ones.",
    )
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    text = whole_page()
    if given.out is not None:
        write(given.out, text)
    print(text, end="")


if __name__ == "__main__":
    main()
