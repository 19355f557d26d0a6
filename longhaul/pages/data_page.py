# SPDX-License-Identifier: Apache-2.0
"""The pages of `longhaul data`: lengths of a store, mix of a stage, a step, and tokenizers."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import typer
from rich import box
from rich.table import Table

from data.census import Census, Kept, Packed, SourceCensus
from longhaul.terminal.console import show
from recipes.spec.naming import counted, length_shown
from recipes.spec.units import GiB, M

EXPENDABLE = ("10%", "90%", "logits")
"""Columns of tokenizers that a narrow terminal leaves out, in this order."""


def show_census(found: Census) -> None:
    """Print the census of a store."""
    together = found.together
    rows = [*found.sources, together] if len(found.sources) > 1 else [together]
    show(lambda _: _sources(rows))
    show(lambda _: _histogram(together))
    show(lambda _: _kept(together, found.packed))
    for line in _sentences(found):
        typer.echo(line)


def holding_most(row: SourceCensus, share: float = 0.95) -> Kept:
    """Return the shortest length whose rows hold this share of the tokens whole, or the longest."""
    return next((kept for kept in row.kept if kept.best_fit_tokens >= share), row.kept[-1])


def _sources(rows: Sequence[SourceCensus]) -> Table:
    bounds = [f"> {length_shown(tail.above_tokens)}" for tail in rows[0].tails]
    table = _table(
        "Sources: share of the tokens in documents above a length", "source",
        ("documents", "tokens", "median", "longest", *bounds),
    )  # fmt: skip
    for row in rows:
        shares = (_percent(tail.tokens, row.tokens) for tail in row.tails)
        table.add_row(
            row.name, f"{row.documents:,}", f"{row.tokens:,}", f"{row.median_tokens:,}",
            f"{row.longest_tokens:,}", *shares,
        )  # fmt: skip
    return table


def _histogram(row: SourceCensus) -> Table:
    table = _table("Documents by length", "tokens", ("documents", "of documents", "of tokens"))
    for bucket in row.buckets:
        table.add_row(
            f"{bucket.at_least_tokens:,} to {2 * bucket.at_least_tokens - 1:,}",
            f"{bucket.documents:,}",
            _percent(bucket.documents, row.documents),
            _percent(bucket.tokens, row.tokens),
        )
    return table


def _kept(row: SourceCensus, packed: Sequence[Packed]) -> Table:
    table = _table(
        "Kept whole in rows of a sequence length", "sequence",
        ("documents, cut", "tokens, cut", "documents, best-fit", "tokens, best-fit", "padding"),
    )  # fmt: skip
    for kept, rows in zip(row.kept, packed, strict=True):
        shares = (
            kept.cut_documents, kept.cut_tokens, kept.best_fit_documents, kept.best_fit_tokens,
        )  # fmt: skip
        table.add_row(
            length_shown(kept.seq_length_tokens),
            *(f"{share:.1%}" for share in shares),
            f"{rows.padding:.2%}",
        )
    return table


def _sentences(found: Census) -> Iterator[str]:
    together = found.together
    yield (
        f"half of the tokens are in documents of at least {together.median_by_tokens:,} tokens, "
        f"half of the documents have at least {together.median_tokens:,}, and the longest has "
        f"{together.longest_tokens:,}"
    )
    packed = found.packed[0].documents
    if packed < together.documents:
        yield f"padding: of {packed:,} documents drawn from all and packed by best fit"
    if found.copies is None:
        yield "copies: not counted, since --lengths-only reads no tokens"
        return
    copies = found.copies
    yield (
        f"copies: {copies.documents:,} of {together.documents:,} documents "
        f"({_percent(copies.tokens, together.tokens)} of the tokens) have the tokens of an earlier "
        "one"
        + (f"; the most frequent text occurs {copies.largest_group_documents:,} times"
           if copies.documents else "")
    )  # fmt: skip
    if copies.heldout_documents_in_train:
        yield (
            f"{copies.heldout_documents_in_train:,} held-out documents are also in the training "
            "documents: evaluations are better than they would be on unseen text"
        )


def show_stage(content: dict[str, Any]) -> None:
    """Print what a stage takes of each source, and its packed rows."""
    length = length_shown(content["seq_length_tokens"])
    sources = _table(
        f"What a stage of {length} takes", "documents",
        ("share", "tokens", "in the store", "times seen"),
    )  # fmt: skip
    for need in content["sources"]:
        sources.add_row(
            need["words"], f"{need['share']:.1%}", f"{need['tokens']:,}", f"{need['held']:,}",
            f"{need['repeats']:.2f}",
        )  # fmt: skip
    groups = _table(
        "Packed rows", "documents",
        ("row", "weight", "packed", "taken", "padding", "most documents"),
    )  # fmt: skip
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
    table = _table(
        f"Documents of step {content['step']:,}", "data rank",
        ("sequence", "document", "from token", "tokens"),
    )  # fmt: skip
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


def show_tokenizers(content: dict[str, Any], *, hidden: int, tied: bool) -> None:
    """Print a row for each tokenizer, and what the figures mean."""
    show(lambda without: _tokenizers(content, without), EXPENDABLE)
    what = counted(content["documents"], "held-out document" if content["heldout"] else "document")
    none = "" if content["heldout"] else "no document of the source is held out, "
    typer.echo(
        f"tokens a document: of {what}, {none}"
        f"{content['sample_bytes'] / M:,.1f} MiB of {content['source']}"
    )
    matrices = "embedding, tied to the head" if tied else "embedding and head"
    typer.echo(
        f"vocabulary: {matrices} in bf16 at hidden size {hidden:,} ({content['card']}), without "
        "gradients and optimizer; logits: fp32, of a sequence of "
        f"{length_shown(content['seq_length_tokens'])} tokens, if they are not tiled"
    )


def _tokenizers(content: dict[str, Any], without: Sequence[str]) -> Table:
    rows = content["tokenizers"]
    quantiles = {
        f"{quantile:.0%}": [f"{row['tokens_per_document_quantiles'][at]:,.0f}" for row in rows]
        for at, quantile in enumerate(content["quantiles"])
    }
    cells = {
        "vocabulary": [f"{row['vocab_tokens']:,}" for row in rows],
        "tokens a document": [f"{row['tokens_per_document']:,.0f}" for row in rows],
        **quantiles,
        "longest": [f"{row['longest_document_tokens']:,}" for row in rows],
        "bytes a token": [f"{row['bytes_per_token']:.2f}" for row in rows],
        "vocabulary, MiB": [f"{row['embedding_and_head_bytes'] / M:,.1f}" for row in rows],
        "logits": [f"{row['logits_bytes'] / GiB:.1f} GiB" for row in rows],
    }
    shown = {title: column for title, column in cells.items() if title not in without}
    table = Table(title="Tokenizers on the same documents", box=box.ASCII2)
    table.add_column("tokenizer", overflow="fold")
    for title in shown:
        table.add_column(title, justify="right", no_wrap=True)
    for at, row in enumerate(rows):
        table.add_row(str(row["name"]), *(column[at] for column in shown.values()))
    return table


def _table(title: str, first: str, others: Iterable[str]) -> Table:
    table = Table(title=title, box=box.ASCII2)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _percent(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0:.1%}"
