# SPDX-License-Identifier: Apache-2.0
"""Lengths of a store's training documents, what each sequence length keeps whole, and copies.

`LengthTable` has one row for each length that occurs, so that what comes after does not depend on
the number of documents: 10 million documents have some 100,000 lengths. For a sequence length S it
says which share of the documents, and of their tokens, a row contains from beginning to end:

    best-fit    keeps a document of l tokens whole if l <= S.
    cut         (concatenate and cut) puts it at a uniform offset in a row of S tokens, so that it
                is whole with probability (S - l + 1) / S if l <= S, else 0.
    padding     what the packer (`data.packing`) leaves free in the rows of a sample of documents.
                A document longer than S is cut in full rows and a remainder.

Copies are documents of the same token ids, by the hashes of `data.token_files.document_scan`, over
all sources and both splits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.packing.best_fit import best_fit
from data.progress import progress
from data.store import Manifest, SplitName, StoreError
from data.token_files.document_scan import scan
from data.token_files.length_counts import LengthCounts
from data.token_files.megatron_index import MegatronIndex, read_index, require_within

K = 1024
ABOVE = (4 * K, 16 * K, 64 * K, 128 * K, 1024 * K)
"""Lengths above which documents and tokens are counted."""
SHORTEST, LONGEST = 2 * K, 1024 * K
"""Sequence lengths of which it is counted what they keep whole: powers of two in between."""
PACKED = 2**17
"""Documents that are packed to measure padding: all, or as many drawn from them."""
COUNTED = 2**22
"""Lengths below this are counted in an array; longer ones are sorted."""
AT_ONCE = 2**22

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    """The documents longer than a number of tokens."""

    above_tokens: int
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """The documents of at least this many tokens and fewer than twice as many."""

    at_least_tokens: int
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What rows of one sequence length keep whole, as shares of documents and of their tokens."""

    seq_length_tokens: int
    cut_documents: float
    cut_tokens: float
    best_fit_documents: float
    best_fit_tokens: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Padding of rows that best fit packs."""

    seq_length_tokens: int
    documents: int
    """Documents that were packed."""
    padding: float
    """Share of their rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """Documents whose token ids another document has too, the first of them not counted."""

    documents: int
    tokens: int
    largest_group_documents: int
    """Documents of the text that has most copies, the first counted; 1 if none has."""
    heldout_documents_in_train: int


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
    """Lengths, padding and copies of a store's training documents."""

    sources: tuple[SourceCensus, ...]
    together: SourceCensus
    packed: tuple[Packed, ...]
    """Padding of rows packed from a sample of all documents, for each sequence length."""
    copies: Copies | None
    """None if the tokens were not read."""


def census(manifest: Manifest, *, lengths_only: bool = False) -> Census:
    """Count the training documents of a store; raise ValueError for a damaged index.

    With `lengths_only` the indexes alone are read, not the tokens.
    """
    train = indexes(manifest, "train")
    tables = {name: LengthTable.of([index.lengths]) for name, index in train.items()}
    together = LengthTable.together(tables.values())
    lengths = curve_lengths(together.longest)
    heldout = {} if lengths_only else indexes(manifest, "heldout")
    return Census(
        sources=tuple(_source(name, table, lengths) for name, table in tables.items()),
        together=_source("all", together, lengths),
        packed=tuple(together.packed(length) for length in lengths),
        copies=None if lengths_only else copies(list(train.values()), list(heldout.values())),
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


def copies(train: Sequence[MegatronIndex], heldout: Sequence[MegatronIndex]) -> Copies:
    """Count copies among the documents of a store by reading all of its tokens."""
    of_train, of_heldout = _hashes(train), _hashes(heldout)
    lengths = np.concatenate([np.asarray(index.lengths) for index in train])
    order = np.argsort(of_train, kind="stable")
    ordered = of_train[order]
    is_copy = np.zeros(len(ordered), dtype=bool)
    is_copy[1:] = ordered[1:] == ordered[:-1]
    starts = np.flatnonzero(~is_copy)
    largest = int(np.diff(np.append(starts, len(ordered))).max(initial=0))
    return Copies(
        documents=int(is_copy.sum()),
        tokens=int(lengths[order[is_copy]].sum(dtype=np.int64)),
        largest_group_documents=largest,
        heldout_documents_in_train=int(np.isin(of_heldout, ordered).sum()),
    )


def _hashes(indexes: Sequence[MegatronIndex]) -> NDArray[np.uint64]:
    found = [np.empty(0, dtype=np.uint64)]
    for index in indexes:
        width = index.dtype.itemsize
        with progress(f"reading {index.bin_path.name}", index.tokens * width) as advance:
            facts = scan(
                index.mapped(),
                index.pointers // width,
                index.lengths,
                -1,
                lambda documents, tokens, width=width, advance=advance: advance(  # type: ignore[misc]
                    tokens * width, documents, tokens
                ),
            )
        found.append(facts.hashes)
    return np.concatenate(found)


@dataclass(frozen=True, slots=True)
class LengthTable:
    """The lengths that occur, ascending, and the number of documents of each."""

    lengths: Ints
    counts: Ints

    @classmethod
    def of(cls, arrays: Iterable[NDArray[np.int32]]) -> "LengthTable":
        """Count the documents of arrays that may be mapped into memory."""
        short = np.zeros(COUNTED, dtype=np.int64)
        long = [np.empty(0, dtype=np.int64)]
        for array in arrays:
            for start in range(0, len(array), AT_ONCE):
                some = array[start : start + AT_ONCE].astype(np.int64)
                is_short = some < COUNTED
                if not is_short.all():
                    long.append(some[~is_short])
                    some = some[is_short]
                counted = np.bincount(some)
                short[: len(counted)] += counted
        present = np.flatnonzero(short)
        longer, counts = np.unique(np.concatenate(long), return_counts=True)
        return cls(
            np.concatenate([present, longer]), np.concatenate([short[present], counts])
        )  # fmt: skip

    @classmethod
    def together(cls, tables: Iterable["LengthTable"]) -> "LengthTable":
        """Return the table of all documents of several tables."""
        given = list(tables)
        lengths, places = np.unique(
            np.concatenate([table.lengths for table in given]), return_inverse=True
        )
        counts = np.zeros(len(lengths), dtype=np.int64)
        np.add.at(counts, places, np.concatenate([table.counts for table in given]))
        return cls(lengths, counts)

    @property
    def documents(self) -> int:
        """Documents of all lengths."""
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int((self.lengths * self.counts).sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.lengths[-1]) if len(self.lengths) else 0

    def at_half(self, weights: Ints) -> int:
        """Return the length at half of the weights, which are summed from the shortest on."""
        if not len(weights):
            return 0
        ends = np.cumsum(weights)
        return int(self.lengths[int(np.searchsorted(ends, ends[-1] / 2))])

    def tails(self, above: Iterable[int] = ABOVE) -> tuple[Tail, ...]:
        """Return the documents above each length."""
        found = []
        for bound in above:
            longer = slice(int(np.searchsorted(self.lengths, bound, side="right")), None)
            counts = self.counts[longer]
            tokens = int((self.lengths[longer] * counts).sum())
            found.append(Tail(above_tokens=bound, documents=int(counts.sum()), tokens=tokens))
        return tuple(found)

    def buckets(self) -> tuple[Bucket, ...]:
        """Return the documents by power of two."""
        counts = LengthCounts()
        counts.add(self.lengths, self.counts)
        return tuple(
            Bucket(
                at_least_tokens=bucket.at_least, documents=bucket.documents, tokens=bucket.tokens
            )
            for bucket in counts.buckets()
        )

    def kept(self, seq_length: int) -> Kept:
        """Return what rows of a length keep whole."""
        fitting = slice(0, int(np.searchsorted(self.lengths, seq_length, side="right")))
        lengths, counts = self.lengths[fitting], self.counts[fitting]
        whole = (seq_length + 1 - lengths) / seq_length
        return Kept(
            seq_length_tokens=seq_length,
            cut_documents=_share((counts * whole).sum(), self.documents),
            cut_tokens=_share((counts * lengths * whole).sum(), self.tokens),
            best_fit_documents=_share(counts.sum(), self.documents),
            best_fit_tokens=_share((lengths * counts).sum(), self.tokens),
        )

    def packed(self, seq_length: int, seed: int = 0) -> Packed:
        """Pack up to `PACKED` documents, drawn by a seed, and return the padding of their rows."""
        if self.documents <= PACKED:
            lengths = np.repeat(self.lengths, self.counts)
        else:
            draw = np.random.default_rng(seed)
            numbers = draw.choice(self.documents, PACKED, replace=False, shuffle=False)
            lengths = self.lengths[np.searchsorted(np.cumsum(self.counts), numbers, side="right")]
        full, rest = np.divmod(lengths, seq_length)
        pieces = rest[rest > 0]
        rows = int(full.sum()) + (int(best_fit(pieces, seq_length).max()) + 1 if len(pieces) else 0)
        padding = 1 - _share(lengths.sum(), rows * seq_length)
        return Packed(seq_length_tokens=seq_length, documents=len(lengths), padding=padding)


def curve_lengths(longest: int) -> tuple[int, ...]:
    """Return powers of two from `SHORTEST` to the first that holds every document."""
    lengths, length = [], SHORTEST
    while length < 2 * longest and length <= LONGEST:
        lengths.append(length)
        length *= 2
    return tuple(lengths) or (SHORTEST,)


def _source(name: str, table: LengthTable, lengths: tuple[int, ...]) -> SourceCensus:
    return SourceCensus(
        name=name,
        documents=table.documents,
        tokens=table.tokens,
        longest_tokens=table.longest,
        median_tokens=table.at_half(table.counts),
        median_by_tokens=table.at_half(table.counts * table.lengths),
        buckets=table.buckets(),
        tails=table.tails(),
        kept=tuple(table.kept(length) for length in lengths),
    )


def _share(part: float, whole: float) -> float:
    return float(part) / whole if whole else 0.0
