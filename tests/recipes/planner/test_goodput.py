# SPDX-License-Identifier: Apache-2.0
"""Wall time with failures: by hand, by a simulation, and in the recipe."""

from dataclasses import replace

import pytest

from benchmarks.goodput import wall_times
from recipes.models import CARDS
from recipes.notation.layout import layout_from
from recipes.planner.goodput import Failures, failures, goodput
from recipes.planner.plan import plan
from recipes.planner.timeouts import limits
from recipes.planner.workload import Workload
from recipes.spec import cluster
from recipes.spec.reliability import Reliability
from recipes.spec.units import K, M

H100 = cluster.load("dgx_h100")
FREQUENT = Failures(between=7_200, blocked=20, behind=120, down=400, restart=700)
RARE = Failures(between=720_000, blocked=20, behind=120, down=400, restart=700)
MANY = 1_000_000


def planned(words, **known):
    workload = Workload(
        card=CARDS["llama31_8b"], seq_length=128 * K, tokens_per_batch=4 * M,
        layout=layout_from(words), gpus_per_node=8,
    )  # fmt: skip
    return plan(workload, replace(H100, reliability=Reliability(**known)))


@pytest.mark.parametrize("lost", [FREQUENT, RARE], ids=["frequent", "rare"])
def test_expected_times_are_those_of_simulated_runs(lost):
    walls = wall_times(lost, lost.best_interval(), 200, runs=2_000)
    error = walls.std(ddof=1) / len(walls) ** 0.5
    predicted = 200 * lost.expected(lost.best_interval())
    assert abs(walls.mean() - predicted) <= 4 * error + 0.001 * predicted


@pytest.mark.parametrize("lost", [FREQUENT, RARE], ids=["frequent", "rare"])
def test_no_interval_beside_the_best_one_is_better(lost):
    best = lost.best_interval()
    cost = lost.expected(best) / best
    for share in (0.5, 0.9, 0.99, 1.01, 1.1, 2):
        assert lost.expected(share * best) / (share * best) > cost


def test_where_failures_are_rare_the_interval_is_young_s():
    assert RARE.best_interval() == pytest.approx((2 * 20 * 720_000) ** 0.5, rel=0.01)


def test_an_interval_that_no_run_would_end_is_infinitely_long_and_not_an_error():
    assert FREQUENT.expected(1e9) == float("inf")


def test_what_a_job_loses_by_hand():
    found = planned(
        "tp8 ulysses4 kept_attention",
        node_mtbf_hours=1_000, checkpoint_gbps=8, requeue_seconds=60, start_seconds=90,
    )  # fmt: skip
    size = 8_030_261_248 * 14
    lost = failures(found)
    assert lost.between == 1_000 * 3600 / 4
    assert lost.behind == pytest.approx(size / 8e9)
    assert lost.restart == pytest.approx(90 + size / 8e9)
    assert lost.blocked == pytest.approx(5 + size / 32 / (H100.host_link_gbps * 1e9))
    hang = limits(found).collective
    assert lost.down == pytest.approx(60 + 30 * 412 / 419 + hang * 7 / 419)


def test_megatron_fsdp_waits_for_its_checkpoints():
    lost = failures(planned("ulysses8 dp4 zero3", checkpoint_gbps=8))
    assert lost.behind == 0
    assert lost.blocked == pytest.approx(5 + 8_030_261_248 * 14 / 8e9)


def test_a_file_system_that_nobody_described_grows_with_the_nodes():
    known = Reliability()
    assert [known.bytes_per_second(nodes) for nodes in (1, 4, 50)] == [1e9, 1e9, 10e9]
    assert Reliability(checkpoint_gbps=3).bytes_per_second(50) == 3e9


def test_nodes_that_fail_more_often_are_saved_more_often():
    each = [
        goodput(planned("tp8 ulysses4", node_mtbf_hours=hours), MANY)
        for hours in (100, 1_000, 10_000)
    ]
    assert [found.every for found in each] == sorted({found.every for found in each})
    assert [found.share for found in each] == sorted(found.share for found in each)
    assert each[0].share < 0.98 < each[1].share < 0.996 < each[2].share


def test_a_checkpoint_begins_only_after_the_one_before_is_complete():
    found = planned("tp8 ulysses4", checkpoint_gbps=0.01, node_mtbf_hours=10)
    lost = failures(found)
    every = goodput(found, MANY).every
    assert (every - 1) * found.time.step < lost.behind <= every * found.time.step


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (3, 3), (60, 15), (400, 100)])
def test_a_safe_stage_is_saved_four_times_where_that_costs_little(steps, every):
    found = goodput(planned("tp8 ulysses4", node_mtbf_hours=1e6), steps)
    assert found.every == every
    assert found.interval == every * planned("tp8 ulysses4").time.step


def test_a_safe_stage_whose_checkpoints_cost_much_is_saved_at_its_end():
    found = planned("ulysses8 dp4 zero3", node_mtbf_hours=1e6, checkpoint_gbps=0.1)
    assert goodput(found, 60).every == 60


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ({"node_mtbf_hours": 0}, "node_mtbf_hours is 0; it must be positive"),
        ({"requeue_seconds": -1}, "requeue_seconds is -1; it must be at least 0"),
        ({"checkpoint_gbps": float("inf")}, "checkpoint_gbps is inf; .* finite"),
        ({"start_seconds": float("nan")}, "start_seconds is nan"),
    ],
)
def test_impossible_values_are_refused(known, why):
    with pytest.raises(ValueError, match=why):
        Reliability(**known)
