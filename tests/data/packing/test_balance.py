# SPDX-License-Identifier: Apache-2.0
import pytest

from data.packing.balance import balanced, imbalance


def test_rows_are_given_to_the_rank_with_the_least_work() -> None:
    work = [9.0, 5.0, 4.0, 4.0, 1.0, 1.0]
    shares = balanced(work, 2)
    assert shares == [[0, 3, 5], [1, 2, 4]]
    assert imbalance(work, shares) == pytest.approx(14 / 12)
    assert imbalance(work, [[0, 1, 2], [3, 4, 5]]) == pytest.approx(18 / 12)


def test_equal_rows_keep_their_order_over_ranks() -> None:
    assert balanced([1.0] * 6, 3) == [[0, 3], [1, 4], [2, 5]]
    assert imbalance([0.0, 0.0], [[0], [1]]) == 1


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="5 rows do not divide evenly over 2 ranks"):
        balanced([1.0] * 5, 2)
