# SPDX-License-Identifier: Apache-2.0
"""The page of `longhaul tokenizers`: one row for each tokenizer, and what the figures mean."""

from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich import box
from rich.table import Table

from data.tokenization.tokenizer_comparison import Comparison, Shape
from longhaul.terminal.console import show
from recipes.spec.naming import length_shown
from recipes.spec.units import GiB

EXPENDABLE = ("MB/s", "bytes a token", "logits")
"""Columns that a narrow terminal leaves out, in this order."""


def show_comparison(
    compared: Comparison, rows: Sequence[Mapping[str, Any]], shape: Shape, seq_length: int
) -> None:
    """Print the comparison."""
    show(lambda without: _table(compared, rows, without), EXPENDABLE)
    matrices = "embedding, tied to the head" if shape.tied_embeddings else "embedding and head"
    typer.echo(
        f"{compared.documents:,} documents, {compared.bytes / 2**20:,.1f} MiB of "
        f"{compared.source}; speed on {compared.cores} cores"
    )
    typer.echo(
        f"vocabulary: {matrices} in bf16 at hidden size {shape.hidden:,}, without gradients and "
        f"optimizer; logits: fp32, of a sequence of {length_shown(seq_length)} tokens, if they "
        "are not tiled"
    )
    typer.echo(
        "attention: sum of the squared tokens of the documents, relative to the first tokenizer"
    )
    if rows[0]["attention_flops"] is not None:
        flops = ", ".join(f"{row['name']} {row['attention_flops']:.3g}" for row in rows)
        typer.echo(f"FLOPs of attention within these documents, forward and backward: {flops}")


def _table(
    compared: Comparison, rows: Sequence[Mapping[str, Any]], without: Sequence[str]
) -> Table:
    table = Table(title="Tokenizers on the same documents", box=box.ASCII2)
    table.add_column("tokenizer", overflow="fold")
    cells = {
        "vocabulary": [f"{row['vocab_tokens']:,}" for row in rows],
        "tokens a document": [f"{row['tokens_per_document']:,.0f}" for row in rows],
        "bytes a token": [f"{row['bytes_per_token']:.2f}" for row in rows],
        "attention": [f"x {row['attention_ratio']:.2f}" for row in rows],
        "vocabulary, MiB": [f"{row['embedding_and_head_bytes'] / 2**20:,.1f}" for row in rows],
        "logits": [f"{row['logits_bytes'] / GiB:.1f} GiB" for row in rows],
        "round trip": [_exact(row["changed_documents"], compared.documents) for row in rows],
        "MB/s": [f"{row['megabytes_per_second']:.1f}" for row in rows],
    }
    shown = {title: column for title, column in cells.items() if title not in without}
    for title in shown:
        table.add_column(title, justify="right", no_wrap=True)
    for at, row in enumerate(rows):
        table.add_row(str(row["name"]), *(column[at] for column in shown.values()))
    return table


def _exact(changed: int, documents: int) -> str:
    return "exact" if not changed else f"{changed / documents:.1%} differ"
