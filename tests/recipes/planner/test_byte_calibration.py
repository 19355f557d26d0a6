# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from recipes.models import CARDS
from recipes.notation.layout import layout_from
from recipes.planner.accuracy import bytes_range, has_calibrated_bytes
from recipes.planner.byte_calibration import (
    OF_ONE,
    MeasuredBytes,
    calibrated_bytes,
)
from recipes.planner.kernels import kernels_on
from recipes.planner.memory import memory
from recipes.planner.plan import plan
from recipes.planner.search.ranking import search
from recipes.planner.search.request import SearchRequest
from recipes.planner.workload import Workload
from recipes.spec import cluster
from recipes.spec.memory_constants import MemoryConstants
from recipes.spec.units import GiB, K, M

H100 = cluster.load("dgx_h100")
TRUE = MemoryConstants(reserve_gib=6.5, unknown_inputs=12.0)
WORDS = "tp2 ulysses4 kept_attention tile-loss"


def workload(seq, words=WORDS):
    return Workload(
        card=CARDS["llama31_8b"], seq_length=seq, tokens_per_batch=4 * M,
        layout=layout_from(words), gpus_per_node=8,
    )  # fmt: skip


def true_bytes(of_step, constants=TRUE):
    return memory(of_step, kernels_on(replace(H100, memory=constants))).total


def measured(*lengths, tensors=True, words=WORDS):
    found = []
    for seq in lengths:
        process = true_bytes(workload(seq, words))
        found.append(
            MeasuredBytes(
                name=f"{seq}", workload=workload(seq, words), process=process,
                tensors=process - TRUE.reserve_gib * GiB if tensors else None,
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize("tensors", [True, False], ids=["tensors logged", "by nvidia-smi"])
def test_steps_of_several_lengths_give_the_reserve_and_the_unknown_buffers(tensors):
    found = calibrated_bytes(measured(64 * K, 128 * K, 384 * K, tensors=tensors), H100)
    assert found.constants.reserve_gib == pytest.approx(TRUE.reserve_gib, abs=0.5)
    assert found.constants.unknown_inputs == pytest.approx(TRUE.unknown_inputs, rel=0.2)
    assert found.constants.error < 0.04
    unseen = workload(512 * K)
    fitted = replace(H100, memory=found.constants)
    assert plan(unseen, fitted).memory.total == pytest.approx(true_bytes(unseen), rel=0.02)
    assert plan(unseen, H100).memory.total < 0.95 * true_bytes(unseen)


def test_one_step_shares_what_it_shows_between_both_constants():
    found = calibrated_bytes(measured(256 * K, tensors=False), H100)
    assert H100.memory.reserve_gib < found.constants.reserve_gib
    assert 0.5 * TRUE.unknown_inputs < found.constants.unknown_inputs < TRUE.unknown_inputs
    assert found.constants.error == OF_ONE
    assert not found.left_out


def test_residuals_shrink_and_the_range_is_that_of_the_error():
    steps = measured(64 * K, 128 * K, 256 * K)
    found = calibrated_bytes(steps, H100)
    for step, before, after in zip(steps, found.before, found.after, strict=True):
        assert abs(after / step.process - 1) < abs(before / step.process - 1)
    planned = plan(workload(64 * K), replace(H100, memory=found.constants))
    assert has_calibrated_bytes(planned)
    total = planned.memory.total
    error = found.constants.error
    assert bytes_range(planned) == pytest.approx(((1 - error) * total, (1 + error) * total))


def test_the_search_counts_the_constants_of_the_cluster_file():
    question = SearchRequest(
        card=CARDS["llama31_8b"], seq_length=1 * M, tokens_per_batch=4 * M, cluster=H100, gpus=8
    )
    large = replace(H100, memory=MemoryConstants(reserve_gib=20.0))
    with_more = search(replace(question, cluster=large)).plans[0]
    assert with_more.memory.categories["reserve"] == 20 * GiB
    assert with_more.time.step >= search(question).plans[0].time.step


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: [], "no measured peak of memory"),
        (lambda one: [replace(one, process=90 * GiB)], "is more than the 79.1 GiB of H100"),
        (lambda one: [replace(one, process=10 * GiB)], "is less than weights, gradients and"),
        (
            lambda one: [one, replace(one, name="other", process=0.8 * one.process)],
            "and other contradict each other: the same workload takes",
        ),
    ],
    ids=["none", "another GPU", "another card", "contradiction"],
)
def test_bytes_that_cannot_be_of_these_steps_are_refused(change, said):
    (one,) = measured(128 * K)
    with pytest.raises(ValueError, match=said):
        calibrated_bytes(change(one), H100)


@pytest.mark.parametrize("given", [{"reserve_gib": -1.0}, {"error": float("nan")}], ids=str)
def test_constants_that_cannot_be_are_refused(given):
    with pytest.raises(ValueError, match="it must be at least 0, and finite"):
        MemoryConstants(**given)
