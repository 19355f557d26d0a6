# SPDX-License-Identifier: Apache-2.0
"""Which ranks are slow by their own times: single ranks, and replicas whose ranks wait together."""

import math
import mmap
from types import SimpleNamespace

import pytest

from custom_modules.callbacks.rank_times import compared, private_bytes
from custom_modules.callbacks.stragglers import slow_gpus


def test_the_rank_that_takes_longer_than_the_others_is_listed_with_its_ratio():
    found = compared([1.0, 1.02, 1.5, 0.98], [0, 1, 2, 3])
    assert found["compute_seconds"] == pytest.approx(1.01)
    (slow,) = found["slow_ranks"]
    assert slow["ranks"] == [2]
    assert slow["times_the_others"] == pytest.approx(1.5)


def test_of_two_ranks_the_slow_one_is_compared_with_the_other():
    (slow,) = compared([1.0, 1.3], [0, 1])["slow_ranks"]
    assert (slow["ranks"], slow["times_the_others"]) == ([1], pytest.approx(1.3))
    assert compared([1.0, 1.05], [0, 1])["slow_ranks"] == []


def test_ranks_that_wait_for_each_other_within_a_step_are_one_replica():
    (slow,) = compared([1.0, 1.0, 1.4, 1.39], [0, 0, 1, 1])["slow_ranks"]
    assert slow["ranks"] == [2, 3]
    assert compared([1.0, 1.4], [0, 0]) == {}
    assert compared([1.0, math.nan], [0, 1]) == {}


def test_the_memory_of_this_process_grows_by_what_it_keeps():
    before = private_bytes()
    # Of its own: what an allocator hands out again was this process's before.
    kept = mmap.mmap(-1, 32 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    kept[:: mmap.PAGESIZE] = b"x" * (len(kept) // mmap.PAGESIZE)
    assert 24 * 2**20 < private_bytes() - before < 48 * 2**20


def test_the_gpus_of_a_report_below_either_threshold_are_listed_by_the_lower_score():
    report = SimpleNamespace(
        gpu_relative_perf_scores={0: 1.0, 1: 0.6, 2: 0.65},
        gpu_individual_perf_scores={0: 0.99, 1: 0.5, 2: 0.9},
        rank_to_node={0: "n1", 1: "n1", 2: "n2"},
    )
    assert slow_gpus(report, 0.7, 0.7) == [
        {"rank": 1, "node": "n1", "score": 0.5}, {"rank": 2, "node": "n2", "score": 0.65},
    ]  # fmt: skip
