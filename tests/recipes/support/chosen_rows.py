# SPDX-License-Identifier: Apache-2.0
"""Of a grid over the shipped recipes, which the suite runs; the others run nightly."""

from collections.abc import Callable, Hashable, Iterable

import pytest

from recipes.shipped.row import Row
from recipes.shipped.table import ROWS

Facts = Callable[[Row], Iterable[Hashable]]


def family_and_layout(row: Row) -> Iterable[Hashable]:
    """Yield the family of a row's card and the kind of its layout, which any width shares."""
    yield row.card.family
    yield from layout_of(row)


def card_and_layout(row: Row) -> Iterable[Hashable]:
    """Yield a row's card and the kind of its layout."""
    yield row.card.name
    yield from layout_of(row)


def card_ladder_and_layout(row: Row) -> Iterable[Hashable]:
    """Yield a row's card, its ladder and the kind of its layout."""
    yield row.ladder.name, "ladder"
    yield from card_and_layout(row)


def layout_of(row: Row) -> Iterable[Hashable]:
    """Yield what a row's layout uses, without the sizes."""
    layout = row.layout
    for name in ("tp", "pp", "vpp", "dp", "ep", "micro_batch"):
        if getattr(layout, name) > 1:
            yield name
    yield row.nodes > 1, "several nodes"
    yield row.cluster, row.planned
    yield layout.cp.how.kind, layout.cp.how.heads_per_stage is None
    yield layout.recompute.kind, "recompute"
    yield layout.offload.tensors, "offload"
    yield layout.sharding, layout.optimizer_offload > 0
    yield layout.tiling.loss, layout.tiling.mlp
    yield layout.precision, layout.fp8.recipe
    yield row.stage.positions.kind, row.stage.documents, row.stage.start


def chosen(facts: Facts, rows: Iterable[Row] = tuple(ROWS.values())) -> list:
    """Return rows as parameters by name: the few that have every fact of all, the rest nightly."""
    rows = list(rows)
    by_name = {row.name: frozenset(facts(row)) for row in rows}
    missing, few = set().union(*by_name.values()), set()
    by_size = sorted(rows, key=lambda row: (row.nodes, row.card.matmul_parameters))
    while missing:
        richest = max(by_size, key=lambda row: len(by_name[row.name] & missing))
        few.add(richest.name)
        missing -= by_name[richest.name]
    return [
        pytest.param(row.name, marks=() if row.name in few else pytest.mark.nightly) for row in rows
    ]
