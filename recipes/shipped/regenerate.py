# SPDX-License-Identifier: Apache-2.0
"""The table of `recipes.shipped.table` as the planner would write it today.

    python -m recipes.shipped.regenerate

Each stage gets the fewest nodes, of 1, 2, 4, ... (times 7 for a model whose layers only 7 and its
multiples share), on which its fastest layout ends the stage in ten days, without what has not been
tried on GPUs (Megatron FSDP, Adam on the host). A row whose heading says why it is laid out so
stays. To be put into the table where the planner's formulas have changed, and to be read first.
"""

import sys
from collections.abc import Iterator
from itertools import groupby

from recipes.notation.layout import words_of
from recipes.planner.plan import Plan
from recipes.planner.search import of_stage, search
from recipes.shipped.table import ROWS, Row
from recipes.spec import cluster
from recipes.spec.naming import length_word

DAYS, MOST_NODES = 10, 256
ODD_NODES = {"llama31_405b": 7}
"""126 layers are 2 x 7 x 9, so pipelines of 7 and 14."""


def laid_out(row: Row) -> tuple[int, Plan] | None:
    """Return the nodes and the plan of a row's stage; None where nothing fits 256 nodes."""
    nodes = ODD_NODES.get(row.card.name, 1)
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
    plans = search(of_stage(row.card, row.stage, machine, gpus=gpus, fp8=fp8)).plans
    return next((plan for plan in plans if _tried(plan)), None)


def days(row: Row, plan: Plan) -> float:
    """Return how long a plan takes for the stage's tokens."""
    return plan.gpu_hours(row.stage.tokens) / plan.gpus / 24


def _tried(plan: Plan) -> bool:
    layout = plan.job.layout
    return layout.sharding == "optimizer" and not layout.optimizer_offload


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    for heading, rows in groupby(ROWS.values(), key=lambda row: row.heading):
        yield heading
        for row in rows:
            if not row.planned:
                yield f"  {length_word(row.seq_length)} {row.nodes} {words_of(row.layout)}"
                continue
            found = laid_out(row)
            if found is None:
                raise ValueError(f"nothing fits {row.name}")
            nodes, plan = found
            yield f"  {length_word(row.seq_length)} {nodes} {words_of(plan.job.layout)}"


if __name__ == "__main__":
    sys.stdout.write("\n".join(table()) + "\n")
