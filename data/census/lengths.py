# SPDX-License-Identifier: Apache-2.0
"""How many documents have each length, and what follows from that alone.

`LengthTable` has one row for each length that occurs, so that what comes after does not depend on
the number of documents: 10 million documents have some 100,000 lengths. Cumulative sums over its
rows answer every question about one sequence length S by one search:

    best-fit    keeps a document of l tokens whole if l <= S.
    cut         (concatenate and cut) puts it at a uniform offset in a row of S tokens, so that it
                is whole with probability (S - l + 1) / S if l <= S, else 0.
    padding     what the packer (`data.packing`) leaves free in the rows of a sample of documents,
                and a bound: whole documents need at least max(ceil(T / S), H, ceil(D / cap)) rows,
                with T tokens in all, H pieces longer than half a row, two of which share no row, D
                pieces and a cap of pieces a row. What these rows have beyond T tokens no packing
                avoids. A document longer than S is cut in full rows and a remainder.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from data.packing.best_fit import best_fit
from data.token_files.length_counts import LengthCounts

K = 1024
ABOVE = (4 * K, 16 * K, 64 * K, 128 * K, 1024 * K)
"""Lengths above which documents and tokens are counted."""
SHORTEST, LONGEST = 2 * K, 1024 * K
"""Sequence lengths of the curves: powers of two in between."""
PACKED = 2**17
"""Documents that are packed to measure padding: all, or as many drawn from them."""
COUNTED = 2**22
"""Lengths below this are counted in an array; longer ones are sorted."""
AT_ONCE = 2**22

if TYPE_CHECKING:
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
    least_padding: float
    """Share of the row's tokens that no packing of whole documents can fill."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Padding of rows that best fit packs."""

    seq_length_tokens: int
    documents: int
    """Documents that were packed."""
    padding: float
    """Share of their rows."""


@dataclass(frozen=True, slots=True)
class LengthTable:
    """The lengths that occur, ascending, and the number of documents of each."""

    lengths: "Ints"
    counts: "Ints"

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

    def median(self) -> int:
        """Return the length that half of the documents exceed at most."""
        return self._at_half(self.counts)

    def median_by_tokens(self) -> int:
        """Return the length of the document that a token in the middle belongs to."""
        return self._at_half(self.counts * self.lengths)

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

    def kept(self, seq_length: int, cap: int | None = None) -> Kept:
        """Return what rows of a length keep whole; `cap` is the documents a row at most."""
        fitting = slice(0, int(np.searchsorted(self.lengths, seq_length, side="right")))
        lengths, counts = self.lengths[fitting], self.counts[fitting]
        tokens = int((lengths * counts).sum())
        documents = int(counts.sum())
        whole = (seq_length + 1 - lengths) / seq_length
        return Kept(
            seq_length_tokens=seq_length,
            cut_documents=_share(float((counts * whole).sum()), self.documents),
            cut_tokens=_share(float((counts * lengths * whole).sum()), self.tokens),
            best_fit_documents=_share(documents, self.documents),
            best_fit_tokens=_share(tokens, self.tokens),
            least_padding=1 - _share(self.tokens, self.least_rows(seq_length, cap) * seq_length),
        )

    def least_rows(self, seq_length: int, cap: int | None = None) -> int:
        """Return a number of rows below which no packing of whole documents gets."""
        full, rest = np.divmod(self.lengths, seq_length)
        full_rows = int((full * self.counts).sum())
        pieces = int(self.counts[rest > 0].sum())
        over_half = int(self.counts[2 * rest > seq_length].sum())
        tokens = int((rest * self.counts).sum())
        return full_rows + max(
            -(-tokens // seq_length), over_half, -(-pieces // cap) if cap else 0
        )  # fmt: skip

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
        padding = 1 - _share(int(lengths.sum()), rows * seq_length)
        return Packed(seq_length_tokens=seq_length, documents=len(lengths), padding=padding)

    def _at_half(self, weights: "Ints") -> int:
        if not len(weights):
            return 0
        ends = np.cumsum(weights)
        return int(self.lengths[int(np.searchsorted(ends, ends[-1] / 2))])


def curve_lengths(longest: int) -> tuple[int, ...]:
    """Return powers of two from `SHORTEST` to the first that holds every document."""
    lengths, length = [], SHORTEST
    while length < 2 * longest and length <= LONGEST:
        lengths.append(length)
        length *= 2
    return tuple(lengths) or (SHORTEST,)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
