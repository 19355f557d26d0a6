# SPDX-License-Identifier: Apache-2.0
"""Write nodes and layouts of `recipes.shipped.table` as the planner chooses them today.

    python -m recipes.shipped.regenerate

Each stage gets the fewest nodes, of 1, 2, 4, ..., on which its fastest layout ends the stage in ten
days, without what was not tried on GPUs, or failed there (Megatron FSDP, Adam on the host). The
fastest is that of `longhaul plan --tightest`: a row is rehearsed as it is written, so it changes
only for its time.
A row that says by `pinned` what stands behind its layout keeps it, and so does all other text of
the file. The rows that change are printed; read their difference before you commit it. For a new
row write `_row("CARD@LADDER:LENGTH", "dgx_h100:1", "one rank"),` and run this.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from recipes.notation.layout import words_of
from recipes.planner.plan import Plan
from recipes.planner.search.ranking import search
from recipes.planner.search.request import of_stage
from recipes.shipped import table
from recipes.shipped.row import Row
from recipes.spec import cluster
from recipes.spec.naming import length_word

DAYS, MOST_NODES = 10, 256
WIDTH = 100
CALL = re.compile(
    r'^    _row\("(?P<address>[^"]+)", "[^"]+",\s+"[^"]+"'
    r'(?P<rest>(?:,\s+variant="(?P<variant>\w+)")?[^)]*\),)',
    re.MULTILINE,
)
"""A row of the table: address, cluster and nodes, layout, then what regeneration keeps."""


def laid_out(row: Row) -> tuple[int, Plan] | None:
    """Return the nodes and the plan of a row's stage; None where nothing fits."""
    nodes = 1
    while nodes <= MOST_NODES:
        found = fastest(row, nodes)
        if found is not None and (days(row, found) <= DAYS or 2 * nodes > MOST_NODES):
            return nodes, found
        nodes *= 2
    return None


def fastest(row: Row, nodes: int) -> Plan | None:
    """Return the fastest plan of a row's stage on so many nodes."""
    machine = cluster.load(row.cluster)
    gpus = nodes * machine.gpus_per_node
    fp8 = row.layout.fp8
    question = of_stage(row.card, row.stage, machine, gpus=gpus, fp8=fp8)
    chosen = search(question, tightest=True).automatic
    return None if chosen is None or chosen.untried else chosen


def days(row: Row, plan: Plan) -> float:
    """Return how long a plan takes for the stage's tokens."""
    return plan.gpu_hours(row.stage.tokens) / plan.gpus / 24


def planned_today(row: Row) -> Row:
    """Return a row as the planner chooses it today; raise ValueError where nothing fits."""
    chosen = laid_out(row)
    if chosen is None:
        raise ValueError(f"nothing fits {row.name}")
    nodes, plan = chosen
    return replace(row, nodes=nodes, layout=plan.workload.layout)


def rewritten(source: str, rows: Mapping[str, Row]) -> str:
    """Return the table's source with the nodes and layouts of these rows; all else stays."""
    by_call = {(_address(row), row.variant): row for row in rows.values()}

    def call(found: re.Match[str]) -> str:
        row = by_call.get((found["address"], found["variant"] or ""))
        if row is None:
            return found[0]
        start = f'    _row("{found["address"]}", "{row.cluster}:{row.nodes}",'
        layout, rest = f'"{words_of(row.layout)}"', " ".join(found["rest"].split())
        if len(f"{start} {layout}{rest}") <= WIDTH:
            return f"{start} {layout}{rest}"
        margin = " " * 8
        if len(f"{margin}{layout}{rest}") > WIDTH:
            rest = rest.replace(", ", f",\n{margin}", 1)
        return f"{start}\n{margin}{layout}{rest}"

    return CALL.sub(call, source)


def _address(row: Row) -> str:
    return f"{row.card.name}@{row.ladder.name}:{length_word(row.seq_length).upper()}"


def main() -> None:
    """Rewrite the table and print the rows that change."""
    rows = {name: planned_today(row) for name, row in table.ROWS.items() if row.planned}
    file = Path(table.__file__)
    file.write_text(rewritten(file.read_text(encoding="utf-8"), rows), encoding="utf-8")
    for name, row in rows.items():
        if row != table.ROWS[name]:
            sys.stdout.write(f"{name}: {row.nodes} x {row.cluster}, {words_of(row.layout)}\n")


if __name__ == "__main__":
    main()
