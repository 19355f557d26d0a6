# SPDX-License-Identifier: Apache-2.0
"""Rehearsed recipes: one of each ladder and model family; the suite's are the fewest of these.

`make rehearsals` rehearses each and prints a line for it.
"""

import argparse
import json
import re
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


def rehearsed_rows() -> list[Row]:
    """Return the smallest row of each ladder, and of each family that no ladder's row has."""
    rows = smallest_rows()
    missing = {row.card.family for row in ROWS.values()} - {row.card.family for row in rows}
    by_family = [
        [row for row in ROWS.values() if row.card.family == name] for name in sorted(missing)
    ]
    return rows + [
        min(of, key=lambda row: (row.card.matmul_parameters, row.seq_length)) for of in by_family
    ]


def losses(run: Path) -> list[tuple[float, float]]:
    """Return the first and the last training loss of each stage of a rehearsal."""
    checks = json.loads((run / "rehearsal.json").read_text())["checks"]
    stated = (re.search(r": loss (\S+) to (\S+) in", check["words"]) for check in checks)
    return [(float(found[1]), float(found[2])) for found in stated if found]


def line(name: str, run: Path) -> str:
    """Return the line of a rehearsal: whether its checks hold, its losses and seconds."""
    record = run / "rehearsal.json"
    content = json.loads(record.read_text()) if record.is_file() else {"checks": []}
    failed = [check["words"] for check in content["checks"] if not check["holds"]]
    if failed or not content["checks"]:
        return f"FAIL  {name}: {failed[0] if failed else 'it did not end'}"
    stages = ", then ".join(f"{first:.3f} to {last:.3f}" for first, last in losses(run))
    return (
        f"ok    {name}: {len(content['checks'])} checks, loss {stages}, {content['seconds']:.0f} s"
    )


def main() -> None:
    """Rehearse every row and print its line; write lines and run folders if a folder is given."""
    parser = argparse.ArgumentParser(prog="python -m tests.longhaul.support.rehearsed_rows")
    parser.add_argument("--out", type=Path, help="folder of the lines and the run folders")
    parser.add_argument("names", nargs="*", help="recipes; without, one of each ladder and family")
    given = parser.parse_args()
    rows = [ROWS[name] for name in given.names] or rehearsed_rows()
    longhaul = Path(sys.executable).parent / "longhaul"
    with tempfile.TemporaryDirectory() as own:
        folder = given.out or Path(own)
        folder.mkdir(parents=True, exist_ok=True)
        lines = []
        for row in rows:
            run = folder.resolve() / row.name
            words = [longhaul, "rehearse", row.name, "--ranks", str(ranks_for(row)), "--out", run]
            subprocess.run(words, check=False, cwd=TREE, stdout=subprocess.DEVNULL)
            lines.append(line(row.name, run))
            sys.stdout.write(f"{lines[-1]}\n")
            sys.stdout.flush()
            (folder / "rehearsals.txt").write_text("\n".join(lines) + "\n")
    sys.exit(any(line.startswith("FAIL") for line in lines))


if __name__ == "__main__":
    main()
