# SPDX-License-Identifier: Apache-2.0
"""`longhaul recipes`: the shipped recipes as a table that is searched by words."""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longhaul.console import fitted

if TYPE_CHECKING:
    from rich.table import Table

    from recipes.collection import Row

COLUMNS = ("name", "model", "length", "RoPE", "tokens", "GPUs", "source")


def recipes(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Show those with all of these words, in any column."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the shipped recipes: length, rotation, tokens, GPUs (nodes x GPUs), source."""
    from recipes.collection import ROWS

    found = matching(words or [], ROWS)
    if as_json:
        typer.echo(json.dumps([described(row) for row in found], indent=2))
        return
    console, table, left_out = fitted(lambda without: _table(found, without), ("source", "model"))
    console.print(table)
    if left_out:
        console.print()
        console.print(_sources(found))


def matching(words: Sequence[str], rows: "Mapping[str, Row]") -> "list[Row]":
    """Return the rows that have every word in their columns; raise ValueError for none."""
    lines = {name: "\n".join(cells(row)).casefold() for name, row in rows.items()}
    wanted = [word.casefold() for word in words]
    found = [rows[name] for name, line in lines.items() if all(word in line for word in wanted)]
    if not found:
        raise ValueError(_nothing(wanted, lines))
    return found


def cells(row: "Row") -> tuple[str, ...]:
    """Return what the table says of a recipe, by column."""
    from longhaul import facts

    return (
        row.name,
        row.card.name,
        facts.length(row.stage),
        facts.rotation(row.stage, row.card),
        facts.amount(row.stage.tokens),
        facts.machines(row),
        row.ladder.source,
    )


def described(row: "Row") -> dict[str, Any]:
    """Return the same in numbers, for JSON."""
    from longhaul.facts import resolved

    return {
        "name": row.name,
        "card": row.card.name,
        "ladder": row.ladder.name,
        "seq_length": row.stage.seq_length,
        "target_length": row.stage.target_length,
        "rope": resolved(row.stage.rope, row.card).to_dict(),
        "rope_of_card": resolved(row.stage.rope, row.card) == row.card.native_rope,
        "tokens": row.stage.tokens,
        "cluster": row.cluster,
        "nodes": row.nodes,
        "ranks": row.layout.world_size,
        "device": row.layout.device,
        "source": row.ladder.source,
    }


def _table(rows: "Sequence[Row]", without: Sequence[str]) -> "Table":
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    shown = [number for number, title in enumerate(COLUMNS) if title not in without]
    for title in (COLUMNS[number] for number in shown):
        right = title == "tokens"
        table.add_column(title, no_wrap=title != "RoPE", justify="right" if right else "left")
    for row in rows:
        content = cells(row)
        table.add_row(*(content[number] for number in shown))
    return table


def _sources(rows: "Sequence[Row]") -> "Table":
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("ladder", no_wrap=True)
    table.add_column("source")
    for name, source in {row.ladder.name: row.ladder.source for row in rows}.items():
        table.add_row(name, source)
    return table


def _nothing(words: Sequence[str], lines: Mapping[str, str]) -> str:
    """Return why no recipe has the words, with names that are near."""
    strange = [word for word in words if not any(word in line for line in lines.values())]
    if not strange:
        counts = [
            f"{word!r} is in {sum(word in line for line in lines.values())}" for word in words
        ]
        return f"no recipe has all of these words; {', '.join(counts)}"
    there = {word for line in lines.values() for word in line.replace("_", " ").split()}
    word = strange[0]
    near = difflib.get_close_matches(word, [*lines, *sorted(there)], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "`longhaul recipes` lists them all"
    return f"no recipe has {word!r}; {hint}"
