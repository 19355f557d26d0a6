# SPDX-License-Identifier: Apache-2.0
"""The page of `longhaul census`: tables of lengths and of what sequence lengths keep whole."""

from collections.abc import Iterator, Sequence

import typer
from rich import box
from rich.table import Table

from data.census.census import Census, SourceCensus
from data.census.contents import FIFTHS, Compression
from data.census.lengths import Kept, Packed
from longhaul.terminal.console import show
from recipes.spec.naming import length_shown

NOT_READ = "copies and compressibility: not counted, since --lengths-only reads no tokens"


def show_census(counted: Census) -> None:
    """Print the census of a store."""
    together = counted.together
    rows = [*counted.sources, together] if len(counted.sources) > 1 else [together]
    show(lambda _: _sources(rows))
    show(lambda _: _histogram(together))
    show(lambda _: _kept(together, counted.packed))
    if counted.compression:
        show(lambda _: _compressibility(counted.compression))
    for line in _sentences(counted):
        typer.echo(line)


def holding_most(row: SourceCensus, share: float = 0.95) -> Kept:
    """Return the shortest length whose rows hold this share of the tokens whole, or the longest."""
    return next((kept for kept in row.kept if kept.best_fit_tokens >= share), row.kept[-1])


def _sources(rows: Sequence[SourceCensus]) -> Table:
    table = _table("Sources: share of the tokens in documents above a length", "source")
    bounds = [tail.above_tokens for tail in rows[0].tails]
    for title in ("documents", "tokens", "median", "longest", *map(_above, bounds)):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        shares = (_percent(tail.tokens, row.tokens) for tail in row.tails)
        table.add_row(
            row.name, f"{row.documents:,}", f"{row.tokens:,}", f"{row.median_tokens:,}",
            f"{row.longest_tokens:,}", *shares,
        )  # fmt: skip
    return table


def _histogram(row: SourceCensus) -> Table:
    table = _table("Documents by length", "tokens")
    for title in ("documents", "of documents", "of tokens"):
        table.add_column(title, justify="right", no_wrap=True)
    for bucket in row.buckets:
        table.add_row(
            f"{bucket.at_least_tokens:,} to {2 * bucket.at_least_tokens - 1:,}",
            f"{bucket.documents:,}",
            _percent(bucket.documents, row.documents),
            _percent(bucket.tokens, row.tokens),
        )
    return table


def _kept(row: SourceCensus, packed: Sequence[Packed]) -> Table:
    table = _table("Kept whole in rows of a sequence length", "sequence")
    for title in (
        "documents, cut", "tokens, cut", "documents, best-fit", "tokens, best-fit", "padding",
        "at least",
    ):  # fmt: skip
        table.add_column(title, justify="right", no_wrap=True)
    for kept, rows in zip(row.kept, packed, strict=True):
        shares = (
            kept.cut_documents, kept.cut_tokens, kept.best_fit_documents, kept.best_fit_tokens,
        )  # fmt: skip
        table.add_row(
            length_shown(kept.seq_length_tokens),
            *(f"{share:.1%}" for share in shares),
            f"{rows.padding:.2%}",
            f"{kept.least_padding:.2%}",
        )
    return table


def _sentences(counted: Census) -> Iterator[str]:
    together = counted.together
    yield (
        f"half of the tokens are in documents of at least {together.median_by_tokens:,} tokens, "
        f"half of the documents have at least {together.median_tokens:,}, and the longest has "
        f"{together.longest_tokens:,}"
    )
    packed = counted.packed[0].documents
    if packed < together.documents:
        yield f"padding: of {packed:,} documents drawn from all and packed by best fit"
    if counted.copies is None:
        yield NOT_READ
        return
    copies = counted.copies
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


def _compressibility(rows: Sequence[Compression]) -> Table:
    table = _table("Compressibility: bytes of zlib / bytes of text, of a sample", "source")
    table.add_column("documents", no_wrap=True)
    for title in ("sampled", "lowest", *(f"{fifth:.0%} below" for fifth in FIFTHS), "highest"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        which = "all" if row.at_least_tokens <= 1 else f">= {length_shown(row.at_least_tokens)}"
        fifths = [f"{bound:.3f}" for bound in row.fifths] or ["-"] * len(FIFTHS)
        ends = (f"{row.smallest:.3f}", f"{row.largest:.3f}") if row.documents else ("-", "-")
        table.add_row(row.source, which, f"{row.documents:,}", ends[0], *fifths, ends[1])
    return table


def _table(title: str, first: str) -> Table:
    table = Table(title=title, box=box.ASCII2)
    table.add_column(first, no_wrap=True)
    return table


def _above(bound: int) -> str:
    return f"> {length_shown(bound)}"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0:.1%}"
