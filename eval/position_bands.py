# SPDX-License-Identifier: Apache-2.0
"""Mean loss of each document in bands of positions, for standard errors over documents.

The losses of neighbouring positions of one document are not independent, so the error of a mean
over positions cannot be had from the errors at single positions: the mean of each document is
needed. A band is a quarter of the octave that it is in, so that a million tokens have some sixty.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from eval.uncertainty import standard_error
from recipes.spec.schema import Number


@dataclass(frozen=True)
class Bands:
    """Bands of positions `edges[i]` to `edges[i + 1]`, with one number each.

    Args:
        loss: Mean over documents.
        standard_error: Of that mean; NaN for a single document.
        by_document: Mean loss of each document, a row, in the order of the store.
    """

    edges: tuple[int, ...]
    loss: tuple[Number, ...]
    standard_error: tuple[Number, ...]
    by_document: tuple[tuple[Number, ...], ...] = field(repr=False)

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that do not fit the edges."""
        bands = len(self.edges) - 1
        for row in (self.loss, self.standard_error, *self.by_document):
            if len(row) != bands:
                raise ValueError(f"{bands} bands of positions have {len(row)} numbers")

    def of_documents(self, start: int, stop: int) -> list[float]:
        """Return the mean loss of each document over the bands that begin in a range."""
        widths = {at: b - a for at, (a, b) in enumerate(pairwise(self.edges)) if start <= a < stop}
        positions = sum(widths.values())
        return [
            sum(row[at] * width for at, width in widths.items()) / positions
            for row in self.by_document
            if positions
        ]


def bands_of(edges: Sequence[int], by_document: Sequence[Sequence[float]]) -> Bands:
    """Return the bands of documents' mean losses."""
    columns = list(zip(*by_document, strict=True))
    return Bands(
        edges=tuple(edges),
        loss=tuple(sum(column) / len(column) for column in columns),
        standard_error=tuple(standard_error(column) for column in columns),
        by_document=tuple(tuple(row) for row in by_document),
    )


def band_edges(length: int, bucket: int, lengths: Iterable[int] = ()) -> list[int]:
    """Return the edges of bands of 0 to `length`, each a multiple of `bucket`.

    The quarters of each of `lengths`, which gates compare, are edges too.
    """
    edges = {0, length}
    start = bucket
    while start < length:
        edges |= set(range(start, 2 * start, max(bucket, start // 4)))
        start *= 2
    for each in lengths:
        edges |= {math.ceil(each * quarter / 4 / bucket) * bucket for quarter in (1, 2, 3, 4)}
    return sorted(edge for edge in edges if edge <= length)
