# SPDX-License-Identifier: Apache-2.0
"""Documents and tokens by power of two of their length, counted with numpy."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.splits import LengthBucket

AT_ONCE = 2**20
"""Lengths counted at a time: their sum is below 2**53, up to which float64 has every integer."""
POWERS = 32
"""A document has fewer than 2**32 tokens."""


class LengthCounts:
    """Counts of documents whose lengths arrive in arrays."""

    def __init__(self) -> None:
        """Begin without documents."""
        self._documents = np.zeros(POWERS, np.int64)
        self._tokens = np.zeros(POWERS, np.int64)
        self.longest = 0
        """Tokens of the longest document."""

    @property
    def documents(self) -> int:
        """Documents that were counted."""
        return int(self._documents.sum())

    @property
    def tokens(self) -> int:
        """Tokens of all of them."""
        return int(self._tokens.sum())

    def add(
        self, lengths: NDArray[np.integer[Any]], times: NDArray[np.int64] | None = None
    ) -> None:
        """Count documents of these lengths [n], each of at least 1; `times` [n] of each if given.

        With `times`, the documents of one power of two have fewer than 2**53 tokens.
        """
        for start in range(0, len(lengths), AT_ONCE):
            some = np.asarray(lengths[start : start + AT_ONCE], np.float64)
            powers = np.frexp(some)[1] - 1
            counts = np.ones(len(some)) if times is None else times[start : start + AT_ONCE]
            self._documents += _sums(powers, counts)
            self._tokens += _sums(powers, some * counts)
            self.longest = max(self.longest, int(some.max()))

    def buckets(self) -> tuple[LengthBucket, ...]:
        """Return the counts, from the shortest to the longest documents."""
        return tuple(
            LengthBucket(
                at_least=1 << power,
                documents=int(self._documents[power]),
                tokens=int(self._tokens[power]),
            )
            for power in np.flatnonzero(self._documents).tolist()
        )


def _sums(powers: NDArray[np.integer[Any]], weights: NDArray[Any]) -> NDArray[np.int64]:
    return np.bincount(powers, weights, minlength=POWERS).astype(np.int64)


def counts_of(lengths: NDArray[np.integer[Any]]) -> LengthCounts:
    """Return the counts of an array, which may be mapped into memory."""
    counts = LengthCounts()
    counts.add(lengths)
    return counts
