# SPDX-License-Identifier: Apache-2.0
"""The benchmark of attention within a window at a tiny size: what its page holds."""

import pytest
import torch

from benchmarks.windows import Setting, measure, section, sent_by_rank
from tests.benchmarks.test_benchmarks_run import rows_of
from tests.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

TINY = Setting(length=64, window=8, heads=2, head_dim=8, dtype=torch.float32)
MEASURED = ("attention", "note", "error", "forward ms")
RATIOS = ("ours", "over", "forward", "both")


@pytest.fixture(scope="module")
def page():
    return section(TINY, measure(TINY, 2))


def test_ours_and_a_mask_give_the_same_and_flex_says_why_it_is_left_out(page):
    rows = {row[0]: row for row in rows_of(page, MEASURED)}
    assert list(rows) == ["masked", "ours", "whole", "flex"]
    assert float(rows["ours"][2]) <= 1e-5
    assert "does not support backward on CPU" in rows["flex"][1]
    assert all(float(cell) > 0 for name in ("masked", "ours") for cell in rows[name][3:])


def test_ours_is_compared_with_a_mask_and_with_whole_attention(page):
    rows = rows_of(page, RATIOS)
    assert [row[1] for row in rows] == ["masked", "whole"]
    assert all(float(row[at]) > 0 for row in rows for at in (2, 3, 5, 6))


def test_the_share_of_pairs_is_that_of_the_mask():
    within = sum(min(i + 1, TINY.window) for i in range(TINY.length))
    assert TINY.pairs == within / (TINY.length * (TINY.length + 1) / 2)


def test_a_rank_sends_its_halo_or_all_but_its_own_share():
    token = 2 * TINY.heads * TINY.head_dim * 4  # K and V of a token in fp32
    for ((halo, halo_back, ring, ring_back),) in run_ranks(sent_by_rank, 2, [TINY]):
        assert ring == TINY.length // 2 * token
        assert ring < ring_back
        assert halo <= 2 * (TINY.window - 1) * token
        assert halo < halo_back < ring_back
