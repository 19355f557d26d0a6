# SPDX-License-Identifier: Apache-2.0
"""Whole documents share rows, as the textbook's best-fit decreasing places them."""

import numpy as np
import pytest

from data.packing.best_fit import best_fit


def by_the_textbook(lengths: list[int], row: int, most: int | None) -> list[int]:
    """Search all rows for each document."""
    order = sorted(range(len(lengths)), key=lambda at: -lengths[at])
    room: list[int] = []
    held: list[int] = []
    place = [0] * len(lengths)
    for at in order:
        fits = [
            number
            for number in range(len(room))
            if room[number] >= lengths[at] and held[number] != most
        ]
        if not fits:
            room.append(row)
            held.append(0)
            fits = [len(room) - 1]
        best = min(fits, key=lambda number: room[number])
        room[best] -= lengths[at]
        held[best] += 1
        place[at] = best
    return place


@pytest.mark.parametrize("most", [None, 1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_rows_are_as_full_as_those_of_the_textbook(seed: int, most: int | None) -> None:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 101, size=200)
    ours = best_fit(lengths, 100, most=most)
    theirs = by_the_textbook(lengths.tolist(), 100, most)
    rooms = np.bincount(ours, weights=lengths), np.bincount(theirs, weights=lengths)
    assert sorted(rooms[0]) == sorted(rooms[1])
    assert rooms[0].max() <= 100
    assert most is None or np.bincount(ours).max() <= most


def test_documents_of_seven_lengths_fill_two_rows() -> None:
    assert best_fit(np.array([6, 5, 4, 3, 1, 1]), 10).tolist() == [0, 1, 0, 1, 1, 1]


def test_no_documents_take_no_rows() -> None:
    assert best_fit(np.empty(0, np.int64), 10).size == 0


@pytest.mark.parametrize(
    ("lengths", "most", "said"),
    [([0, 3], None, "from 0 to 3"), ([3, 11], None, "from 3 to 11"), ([3], 0, "0 documents")],
)
def test_what_fits_no_row_is_refused(lengths: list[int], most: int | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        best_fit(np.array(lengths), 10, most=most)
