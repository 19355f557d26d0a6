# SPDX-License-Identifier: Apache-2.0
"""Shares fitted to steps whose times are known, and ranges by published points."""

import random
from dataclasses import replace

import pytest

from benchmarks.published_points import TORCHTITAN, bytes_of_peers, rates
from recipes.models import CARDS
from recipes.notation.layout import layout_from
from recipes.planner.accuracy import (
    BYTES,
    RATES,
    RATES_OF_EXPERTS,
    bytes_range,
    is_calibrated,
    rate_range,
)
from recipes.planner.calibration import LEAST_ERROR, OF_ONE, MeasuredStep, calibrated
from recipes.planner.plan import plan
from recipes.planner.time import time
from recipes.planner.workload import Workload
from recipes.spec import cluster
from recipes.spec.efficiency import HOPPER, Efficiency
from recipes.spec.units import K, M

H100 = cluster.load("dgx_h100")
TRUE = replace(
    HOPPER, matmul=0.55, attention_forward=0.42, attention_backward=0.35, memory=0.6, nvlink=0.5
)
ON_CPU = "ulysses2 cpu fp32"


def workload(seq, words="tp2 ulysses4 kept_attention", card="llama31_8b", batch=4 * M):
    return Workload(
        card=CARDS[card], seq_length=seq, tokens_per_batch=batch,
        layout=layout_from(words), gpus_per_node=8,
    )  # fmt: skip


def truth(step, shares=TRUE, machine=H100):
    return time(step, replace(machine, efficiency=shares)).step


def measured(*lengths, words="tp2 ulysses4 kept_attention", noise=0.0):
    drawn = random.Random(0)
    return [
        MeasuredStep(
            name=f"{length}", workload=workload(length, words),
            seconds=truth(workload(length, words)) * (1 + noise * drawn.uniform(-1, 1)),
        )
        for length in lengths
    ]  # fmt: skip


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_length_that_was_not_measured_is_predicted_within_its_error(noise):
    found = calibrated(measured(16 * K, 64 * K, 256 * K, noise=noise), H100)
    assert found.efficiency.time_error <= 0.1
    for length in (32 * K, 128 * K, M):
        step = workload(length)
        before, after = truth(step, HOPPER), truth(step, found.efficiency)
        assert abs(after / truth(step) - 1) <= found.efficiency.time_error
        assert abs(after / truth(step) - 1) < abs(before / truth(step) - 1) / 3


def test_another_layout_is_predicted_better_too():
    found = calibrated(measured(16 * K, 64 * K, 256 * K), H100)
    other = workload(128 * K, "head_chunked4 dp2 kept_attention tile-loss")
    assert abs(truth(other, found.efficiency) / truth(other) - 1) < 0.15
    assert abs(truth(other, HOPPER) / truth(other) - 1) > 0.25


def test_shares_that_no_step_depends_on_stay():
    found = calibrated(measured(16 * K, 64 * K, words="kept_attention dp8"), H100).efficiency
    assert found.nvlink == pytest.approx(HOPPER.nvlink, rel=0.05)
    assert found.network == HOPPER.network
    assert found.host_adam_gbps == HOPPER.host_adam_gbps


def test_products_of_all_kinds_keep_their_proportions():
    found = calibrated(measured(16 * K, 64 * K), H100).efficiency
    factor = found.matmul / HOPPER.matmul
    assert found.matmul_fp8 / HOPPER.matmul_fp8 == pytest.approx(factor, rel=1e-4)
    ahead = found.attention_forward / HOPPER.attention_forward
    assert found.attention_backward / HOPPER.attention_backward == pytest.approx(ahead, rel=1e-4)


def test_the_time_of_the_host_is_found_where_ranks_wait_for_it():
    slow = replace(HOPPER, layer_seconds=2e-3)
    true = replace(slow, layer_seconds=2e-2)
    steps = [
        MeasuredStep(name=f"{length}", workload=step, seconds=truth(step, true))
        for length in (512, K, 2 * K)
        for step in [workload(length, ON_CPU, "tiny", 8 * K)]
    ]
    found = calibrated(steps, replace(H100, efficiency=slow)).efficiency
    assert found.layer_seconds == pytest.approx(2e-2, rel=0.1)
    step = workload(8 * K, ON_CPU, "tiny", 8 * K)
    assert truth(step, found) == pytest.approx(truth(step, true), rel=0.05)


def test_time_per_layer_counts_each_micro_batch_and_recompute():
    each = replace(HOPPER, layer_seconds=1.0)
    step = workload(64 * K, "tp2 ulysses4 dp2 full")
    (added,) = {truth(step, each) - truth(step, HOPPER)}
    assert added == pytest.approx(step.micro_batches * 32 * (1 + 1 / 3), rel=1e-6)
    assert "host" not in time(step, H100).categories


def test_the_error_is_that_of_leaving_one_out():
    good = calibrated(measured(16 * K, 64 * K, 256 * K), H100)
    assert good.efficiency.time_error == LEAST_ERROR
    steps = measured(16 * K, 64 * K, 256 * K)
    disturbed = [*steps[:2], replace(steps[2], seconds=1.6 * steps[2].seconds)]
    found = calibrated(disturbed, H100)
    assert found.efficiency.time_error > 0.15
    assert len(found.left_out) == len(found.before) == len(found.after) == 3
    assert calibrated(steps[:1], H100).efficiency.time_error == OF_ONE


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([], "there is no measured step"),
        ([replace(measured(64 * K)[0], seconds=1.0)], r"would take \d+% of the peak of H100"),
        (
            [*measured(64 * K), *(replace(one, name="again", seconds=1.5 * one.seconds)
                                  for one in measured(64 * K))],
            "65536 and again contradict each other: the same workload takes .* leave the disturbed",
        ),
    ],
)  # fmt: skip
def test_steps_that_cannot_be_are_refused(steps, said):
    with pytest.raises(ValueError, match=said):
        calibrated(steps, H100)


def test_ranges_without_a_calibration_are_those_of_published_points():
    outside = [point for point in rates() if not point.fitted and point.source != TORCHTITAN]
    of_rates = [1 / point.ratio for point in outside if point.family != "Megatron, experts"]
    of_experts = [1 / point.ratio for point in outside if point.family == "Megatron, experts"]
    assert len(of_experts) == 5
    assert (min(of_experts), max(of_experts)) == pytest.approx(RATES_OF_EXPERTS, abs=0.006)
    assert (min(of_rates), max(of_rates)) == pytest.approx(RATES, abs=0.006)
    of_bytes = [1 / point.ratio for point in bytes_of_peers() if not point.fitted]
    assert (min(of_bytes), max(of_bytes)) == pytest.approx(BYTES, abs=0.006)


def test_ranges_of_a_calibrated_plan_are_those_of_its_error():
    found = plan(workload(64 * K), H100)
    rate, size = found.time.tokens_per_gpu_second, found.memory.total
    assert rate_range(found) == (RATES[0] * rate, RATES[1] * rate)
    assert bytes_range(found) == (BYTES[0] * size, BYTES[1] * size)
    fitted = replace(H100, efficiency=replace(HOPPER, time_error=0.1))
    found = plan(workload(64 * K), fitted)
    assert is_calibrated(found)
    assert rate_range(found) == pytest.approx((rate / 1.1, rate * 1.1))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"matmul": 0.0}, "matmul is 0.0; it must be positive"),
        ({"layer_seconds": -1.0}, "layer_seconds is -1.0; it must be at least 0"),
        ({"time_error": float("nan")}, "time_error is nan"),
    ],
)
def test_impossible_shares_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Efficiency(**given)
