# SPDX-License-Identifier: Apache-2.0
"""Pages about a token store: its documents by length, its tokens, its tokenizer."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from data import readers
from data.store import TOKENIZER_FILE

LEFT_OUT = {**readers.LEFT_OUT, "without_eod": "without the token that ends a document"}

if TYPE_CHECKING:
    from rich.table import Table

    from data.store import Manifest


def show_store(manifest: "Manifest") -> None:
    """Print the documents of a store by length, and what it consists of."""
    from longhaul.terminal.console import show

    show(lambda _: _length_table(manifest))
    for line in _summary(manifest):
        typer.echo(line)


def store_as_json(manifest: "Manifest") -> dict[str, Any]:
    """Return what a store consists of, as numbers."""
    return {
        "store": manifest.root,
        "sources": [asdict(source) for source in manifest.sources],
        "tokenizer": asdict(manifest.tokenizer),
        "skipped_documents": manifest.skipped,
        "splits": {
            name: {
                "documents": split.documents,
                "tokens": split.tokens,
                "longest_tokens": split.longest,
                "parts": [asdict(part) for part in split.parts],
            }
            for name, split in (("train", manifest.train), ("heldout", manifest.heldout))
        },
    }


def _length_table(manifest: "Manifest") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table("tokens", title="Documents by length", box=box.ASCII2)
    for heading in ("train", "held out", "share of tokens"):
        table.add_column(heading, justify="right")
    splits = [
        {bucket.at_least: bucket for bucket in split.lengths}
        for split in (manifest.train, manifest.heldout)
    ]
    total = manifest.train.tokens + manifest.heldout.tokens
    for bound in sorted({bound for split in splits for bound in split}):
        found = [split[bound] for split in splits if bound in split]
        table.add_row(
            f"{bound:,} to {2 * bound - 1:,}",
            *(f"{split[bound].documents:,}" if bound in split else "0" for split in splits),
            f"{sum(bucket.tokens for bucket in found) / total:.1%}",
        )
    return table


def _first_tokens(manifest: "Manifest") -> str:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(manifest.tokenizer_path / TOKENIZER_FILE))
    found = manifest.tokenizer.first_ids or ()
    return " ".join(f"{backend.id_to_token(number)} ({number})" for number in found)


def _summary(manifest: "Manifest") -> list[str]:
    facts = manifest.tokenizer
    lines = [
        f"{name}: {split.documents:,} documents, {split.tokens:,} tokens,"
        f" the longest {split.longest:,}"
        for name, split in (("train", manifest.train), ("held out", manifest.heldout))
    ]
    if len(manifest.sources) > 1:
        parts = [part for split in (manifest.train, manifest.heldout) for part in split.parts]
        for source in manifest.sources:
            own = [part for part in parts if part.source == source.name]
            documents, tokens = (
                sum(part.documents for part in own),
                sum(part.tokens for part in own),
            )
            lines.append(f"source {source.name}: {documents:,} documents, {tokens:,} tokens")
    lines.append(f"tokenizer: {facts.name}, {facts.vocab_size:,} tokens")
    if facts.first_ids:
        lines.append(
            f"each document begins with {_first_tokens(manifest)}, as the tokenizer puts it"
        )
    if manifest.skipped:
        counts = ", ".join(f"{n:,} {LEFT_OUT.get(why, why)}" for why, n in manifest.skipped.items())
        lines.append(f"left out: {counts}")
    lines.append(f"store: {manifest.root}")
    return lines
