# SPDX-License-Identifier: Apache-2.0
"""The census of a store: its training documents, source by source and together."""

from dataclasses import dataclass

from data.census.contents import Compression, Copies, compression, copies
from data.census.lengths import Bucket, Kept, LengthTable, Packed, Tail, curve_lengths
from data.store import Manifest, SplitName, StoreError, require_own_tokenizer
from data.token_files.megatron_index import MegatronIndex, read_index, require_within

SAMPLE = 400
"""Documents of each source that are compressed; the bounds of fifths vary by some 2% of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceCensus:
    """Lengths of the documents of one source, or of all."""

    name: str
    documents: int
    tokens: int
    longest_tokens: int
    median_tokens: int
    """Half of the documents are longer."""
    median_by_tokens: int
    """Half of the tokens are in longer documents."""
    buckets: tuple[Bucket, ...]
    tails: tuple[Tail, ...]
    kept: tuple[Kept, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Census:
    """What a store's training documents are like."""

    sources: tuple[SourceCensus, ...]
    together: SourceCensus
    packed: tuple[Packed, ...]
    """Padding of rows packed from a sample of all documents, for each sequence length."""
    copies: Copies | None
    """None if the tokens were not read."""
    compression: tuple[Compression, ...]


def census(
    manifest: Manifest, *, lengths_only: bool = False, sample: int = SAMPLE, seed: int = 0
) -> Census:
    """Count the training documents of a store; raise ValueError for a damaged index or tokenizer.

    Args:
        lengths_only: read the indexes alone, not the tokens.
        sample: documents of each source whose text is compressed.
        seed: seed of that sample, and of the documents that are packed.
    """
    train = indexes(manifest, "train")
    tables = {name: LengthTable.of([index.lengths]) for name, index in train.items()}
    together = LengthTable.together(tables.values())
    lengths = curve_lengths(together.longest)
    of_contents = None
    compressed: tuple[Compression, ...] = ()
    if not lengths_only:
        require_own_tokenizer(manifest)
        of_contents = copies(list(train.values()), list(indexes(manifest, "heldout").values()))
        compressed = compression(
            list(train.items()), manifest.tokenizer_path, manifest.tokenizer.eod_id,
            sample=sample, seed=seed, first=manifest.first_tokens,
        )  # fmt: skip
    return Census(
        sources=tuple(_source(name, table, lengths) for name, table in tables.items()),
        together=_source("all", together, lengths),
        packed=tuple(together.packed(length, seed) for length in lengths),
        copies=of_contents,
        compression=compressed,
    )


def indexes(manifest: Manifest, split: SplitName) -> dict[str, MegatronIndex]:
    """Return the index of each source of a split, by its name; raise StoreError for a damaged one.

    Its documents lie within the token file, whose size the manifest states.
    """
    found = {}
    for part in manifest.split(split).parts:
        index = read_index(manifest.root / part.idx.path)
        if len(index.lengths) != part.documents or index.tokens != part.tokens:
            raise StoreError(
                f"{index.path} lists {len(index.lengths):,} documents of {index.tokens:,} tokens "
                f"and the manifest states {part.documents:,} of {part.tokens:,}; restore it, or "
                "make the store again"
            )
        require_within(index, sum(file.bytes for file in part.bins))
        found[part.source] = index
    return found


def _source(name: str, table: LengthTable, lengths: tuple[int, ...]) -> SourceCensus:
    return SourceCensus(
        name=name,
        documents=table.documents,
        tokens=table.tokens,
        longest_tokens=table.longest,
        median_tokens=table.median(),
        median_by_tokens=table.median_by_tokens(),
        buckets=table.buckets(),
        tails=table.tails(),
        kept=tuple(table.kept(length) for length in lengths),
    )
