# SPDX-License-Identifier: Apache-2.0
"""Which recipes are rehearsed: one of each ladder for its card, the fewest of those by the suite.

`make rehearsals` rehearses one recipe of each ladder and rewrites the verification cards.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from pathlib import Path

from recipes.rehearsal.plan import rehearsal
from recipes.rehearsal.shrink import ParallelDegrees
from recipes.shipped.row import Row
from recipes.shipped.table import ROWS
from recipes.spec.units import K, M
from tests.house.rooms import TREE

CARDS = TREE / "docs" / "cards"
MOST_RANKS = 4
LONGEST = 1 * M
"""Tokens of the longest stage that the suite rehearses at its own length."""


def smallest_rows() -> list[Row]:
    """Return the row of each ladder with the smallest model, the shortest one of those."""
    by_ladder = sorted(ROWS.values(), key=lambda row: row.ladder.name)
    return [
        min(rows, key=lambda row: (row.card.matmul_parameters, row.seq_length))
        for _, rows in groupby(by_ladder, key=lambda row: row.ladder.name)
    ]


def ranks_for(row: Row) -> int:
    """Return how many ranks have room for every kind of a row's parallelism, at most 4."""
    made = rehearsal(row, ranks=1, rows=ROWS)
    needed = (
        ParallelDegrees.of(row.card, part.stage.seq_length, part.layout, part.ranks_per_node).ranks
        for part in made.whole
    )
    return min(MOST_RANKS, max(prod(2 for size in of.values() if size > 1) for of in needed))


def structure(row: Row, rows: Mapping[str, Row] = ROWS) -> frozenset[str]:
    """Return what a row's rehearsal has of the collection's structures, as words.

    Parallelism and memory are taken together, since modules of theirs meet; what a stage states by
    itself (rotation, positions, documents, start) is taken alone.
    """
    made = rehearsal(row, ranks=ranks_for(row), rows=rows)
    words = {f"family {row.card.family}"}
    for part in made.parts:
        layout, stage = part.layout, part.stage
        sharing = [name for name in ("tp", "pp", "dp") if getattr(layout, name) > 1]
        how = layout.cp.how
        if layout.cp.size > 1:
            chunked = " chunked" if how.heads_per_stage and how.kind == "hybrid" else ""
            sharing.append(f"{how.kind}{chunked}")
        tiled = [name for name in ("loss", "mlp") if getattr(layout.tiling, name)]
        memory = [layout.recompute.kind, *tiled, f"offload {layout.offload.tensors}"]
        rope = stage.rope if isinstance(stage.rope, str) else stage.rope.method
        words |= {
            f"sharing {' '.join(sharing)}",
            f"memory {' '.join(memory)}",
            f"rope {rope}",
            f"positions {stage.positions.kind}",
            f"documents {stage.documents}",
            f"start {stage.start}",
            f"precision {layout.precision}",
        }
    return frozenset(words)


def fewest(rows: Sequence[Row]) -> list[Row]:
    """Return rows that together have every structure of all, the richest first."""
    structures = {row.name: structure(row) for row in rows}
    missing = set().union(*structures.values())
    chosen: list[Row] = []
    while missing:
        richest = max(rows, key=lambda row: len(structures[row.name] & missing))
        chosen.append(richest)
        missing -= structures[richest.name]
    return chosen


def of_the_suite() -> list[Row]:
    """Return what the suite rehearses; what is longer than LONGEST as a stage of 128K tokens.

    The layout stays whole. A rehearsal keeps the ratio of the lengths, and steps of thousands of
    tokens on CPU take a minute and a half.
    """
    rows = fewest(smallest_rows())
    return [row if row.seq_length <= LONGEST else _shorter(row, 128 * K) for row in rows]


def _shorter(row: Row, length: int) -> Row:
    steps = row.stage.steps
    stage = replace(row.stage, seq_length=length, tokens=steps * length, tokens_per_batch=length)
    return replace(row, ladder=replace(row.ladder, stages=(stage,)), seq_length=length)


def main() -> None:
    """Rehearse the row of every ladder, then rewrite the cards; end at the first that fails.

    A card names the commit, and says if the tree differs from it, as a new card would make it.
    """
    longhaul = Path(sys.executable).parent / "longhaul"
    with tempfile.TemporaryDirectory() as folder:
        for row in smallest_rows():
            command = [
                longhaul, "rehearse", row.name, "--ranks", str(ranks_for(row)),
                "--out", f"{folder}/{row.name}", "--write-card", f"{folder}/{row.ladder.name}.yaml",
            ]  # fmt: skip
            subprocess.run(command, check=True, cwd=TREE)
        for card in Path(folder).glob("*.yaml"):
            shutil.copy(card, CARDS / card.name)


if __name__ == "__main__":
    main()
