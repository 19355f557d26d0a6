# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from data.packing.permutation import permuted


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 64, 1000, 4097])
def test_every_number_has_a_place_of_its_own(size: int) -> None:
    places = permuted(np.arange(size), size, 7)
    assert sorted(places.tolist()) == list(range(size))


def test_seeds_differ_and_single_numbers_agree_with_all() -> None:
    whole = permuted(np.arange(1000), 1000, (1, 2))
    assert permuted(np.array([17, 990]), 1000, (1, 2)).tolist() == whole[[17, 990]].tolist()
    assert (permuted(np.arange(1000), 1000, (1, 3)) != whole).mean() > 0.9
    moved = np.abs(whole - np.arange(1000)).mean()
    assert 250 < moved < 420  # a third of the size on average, where places are random


def test_a_number_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="5 is outside of the 5"):
        permuted(np.array([5]), 5, 0)
