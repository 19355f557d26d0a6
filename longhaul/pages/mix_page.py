# SPDX-License-Identifier: Apache-2.0
"""The pages of `longhaul mix`: what a stage takes, and the documents of a step."""

from typing import Any

import typer
from rich import box
from rich.table import Table

from longhaul.terminal.console import show
from recipes.spec.naming import length_shown


def show_stage(content: dict[str, Any]) -> None:
    """Print what a stage takes of each source, and its packed rows."""
    length = length_shown(content["seq_length_tokens"])
    sources = Table("documents", title=f"What a stage of {length} takes", box=box.ASCII2)
    for heading in ("share", "tokens", "in the store", "times seen"):
        sources.add_column(heading, justify="right")
    for need in content["sources"]:
        sources.add_row(
            need["words"], f"{need['share']:.1%}", f"{need['tokens']:,}", f"{need['held']:,}",
            f"{need['repeats']:.2f}",
        )  # fmt: skip
    groups = Table("documents", title="Packed rows", box=box.ASCII2)
    for heading in ("row", "weight", "packed", "taken", "padding", "most documents"):
        groups.add_column(heading, justify="right")
    for group in content["groups"]:
        moves = group["end_weight"] != group["weight"]
        weight = f"{group['weight']:.1%}" + (f" to {group['end_weight']:.1%}" if moves else "")
        groups.add_row(
            group["documents"], length_shown(group["seq_length_tokens"]), weight,
            f"{group['rows_packed']:,}", f"{group['rows_taken']:,}", f"{group['padding']:.2%}",
            f"{group['most_documents_in_a_row']:,}",
        )  # fmt: skip
    show(lambda _: sources)
    typer.echo(f"mix: {content['mix']}")
    show(lambda _: groups)
    for words in content["often_repeated"]:
        typer.echo(f"warning: {words}")


def show_step(content: dict[str, Any]) -> None:
    """Print the documents of a step, by data rank and sequence."""
    table = Table("data rank", title=f"Documents of step {content['step']:,}", box=box.ASCII2)
    for heading in ("sequence", "document", "from token", "tokens"):
        table.add_column(heading, justify="right")
    table.add_column("source")
    for number, sequence in enumerate(content["sequences"]):
        for piece in sequence["pieces"]:
            table.add_row(
                str(sequence["data_rank"]), str(number), f"{piece['document']:,}",
                f"{piece['first_token']:,}", f"{piece['tokens']:,}", sequence["source"],
            )  # fmt: skip
    show(lambda _: table)
    each = content["joined_to_tokens"] // content["seq_length_tokens"]
    joined = f", {each} of them end to end in each row of the batch" if each > 1 else ""
    typer.echo(
        f"sequences of {content['seq_length_tokens']:,} tokens{joined}; the data rank with most "
        f"attention has {content['work_max_over_mean']:.3f} times the average"
    )
