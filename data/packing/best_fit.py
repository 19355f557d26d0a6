# SPDX-License-Identifier: Apache-2.0
"""Best-fit decreasing: pack whole documents into rows of S tokens.

    for document in sorted(documents, longest first):
        put it into the row with the least room in which it fits, else into a new row

(Ding et al., arXiv 2404.10830.) Concatenate and cut breaks a document wherever a row ends; here
only documents longer than a row are cut, before packing. What remains free in a row is padding.

The rows with the same room are one list, and the rooms that have rows are a sorted list, so a
document takes a binary search. Documents of a window are held in memory at once, never those of a
whole store.
"""

from bisect import bisect_left, insort
from typing import Any

import numpy as np
from numpy.typing import NDArray


def best_fit(
    lengths: NDArray[np.integer[Any]], row_length: int, *, most: int | None = None
) -> NDArray[np.int64]:
    """Return the row [n] of each document, rows numbered from 0.

    Args:
        lengths: tokens [n] of each document, from 1 to `row_length`.
        most: documents that a row may have; None for no bound.

    Raises ValueError for a length outside of 1 to `row_length`, and a bound below 1.
    """
    if most is not None and most < 1:
        raise ValueError(f"a row may have {most} documents; it needs at least 1")
    if not lengths.size:
        return np.empty(0, np.int64)
    if lengths.min() < 1 or lengths.max() > row_length:
        raise ValueError(
            f"lengths run from {lengths.min():,} to {lengths.max():,}; a document of a row of "
            f"{row_length:,} tokens has 1 to {row_length:,}"
        )
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    rows = np.empty(lengths.size, np.int64)
    rows[order] = _rows(lengths[order].tolist(), row_length, most)
    return rows


def _rows(longest_first: list[int], row_length: int, most: int | None) -> list[int]:
    rooms: list[int] = []  # rooms that some row has, sorted
    with_room: dict[int, list[int]] = {}
    held: list[int] = []  # documents of each row
    rows: list[int] = []
    for length in longest_first:
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, room = len(held), row_length
            held.append(0)
        else:
            room = rooms[place]
            same = with_room[room]
            row = same.pop()
            if not same:
                del rooms[place]
        rows.append(row)
        held[row] += 1
        room -= length
        if room and held[row] != most:
            same = with_room.setdefault(room, [])
            if not same:
                insort(rooms, room)
            same.append(row)
    return rows
