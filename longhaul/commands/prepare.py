# SPDX-License-Identifier: Apache-2.0
"""`longhaul prepare`: documents to a token store."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.prepare import HELDOUT_FRACTION, VOCAB_SIZE
from data.readers import LEFT_OUT
from longhaul.terminal.messages import next_command

if TYPE_CHECKING:
    from rich.table import Table

    from data.store import Manifest


def prepare(
    out: Annotated[Path, typer.Option(help="Folder of the store to write.")],
    source: Annotated[
        str | None,
        typer.Option(
            help="Folder, text file, FILE.jsonl[.gz|.zst], FILE.parquet or"
            " hf:NAME[:CONFIG][@SPLIT]. Without it: the Python standard library's source files."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Folder or name of a Hugging Face tokenizer. Without it one is trained here."
        ),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(help="Tokens of the tokenizer to train; not with --tokenizer.")
    ] = VOCAB_SIZE,
    text_key: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    heldout_fraction: Annotated[
        float, typer.Option(help="Share of the documents kept for evaluation, between 0 and 1.")
    ] = HELDOUT_FRACTION,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Count broken records instead of stopping.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the store at --out.")
    ] = False,
) -> None:
    """Turn documents into a token store: tokenizer, train and held-out tokens, manifest."""
    from data.prepare import prepare as write_store
    from longhaul.terminal.console import show

    if tokenizer is not None and vocab_size != VOCAB_SIZE:
        raise ValueError("--vocab-size is for a tokenizer that is trained; leave out --tokenizer")
    manifest = write_store(
        source,
        out,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        text_key=text_key,
        heldout_fraction=heldout_fraction,
        skip_broken=skip_broken,
        overwrite=overwrite,
    )
    show(lambda _: _length_table(manifest))
    for line in _summary(manifest):
        typer.echo(line)
    next_command(
        ["longhaul", "pretrain", "--factory", "NAME", f"data.store={out}"],
        "train on it; NAME is a recipe that `longhaul recipes` lists",
    )


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


def _summary(manifest: "Manifest") -> list[str]:
    facts = manifest.tokenizer
    lines = [
        f"{name}: {split.documents:,} documents, {split.tokens:,} tokens,"
        f" the longest {split.longest:,}"
        for name, split in (("train", manifest.train), ("held out", manifest.heldout))
    ]
    lines.append(f"tokenizer: {facts.name}, {facts.vocab_size:,} tokens")
    if manifest.skipped:
        counts = ", ".join(f"{n:,} {LEFT_OUT.get(why, why)}" for why, n in manifest.skipped.items())
        lines.append(f"left out: {counts}")
    lines.append(f"store: {manifest.root}")
    return lines
