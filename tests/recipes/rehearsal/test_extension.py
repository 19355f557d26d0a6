# SPDX-License-Identifier: Apache-2.0
"""The small extension of a probe, and what its losses say of the base."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from recipes.ladders import LADDERS
from recipes.rehearsal.extension import probe_ladder, range_ends, slope
from recipes.rehearsal.extension_verdict import Estimate, Reading, verdict
from recipes.spec.units import K, M

NATIVE = 8192
PROLONG = LADDERS["prolong"]


def test_a_probe_is_the_stage_with_few_tokens():
    stage = PROLONG[64 * K]
    ladder = probe_ladder(PROLONG, stage, length=64 * K, tokens=4_000_000, steps=32)
    (small,) = ladder.stages
    assert small == replace(
        stage, tokens=4_000_000, tokens_per_batch=64 * K, start="card", gate=small.gate
    )
    assert (small.steps, ladder.name, ladder.suites) == (61, "prolong_probe", ())
    (larger,) = probe_ladder(PROLONG, stage, length=64 * K, tokens=400 * M, steps=32).stages
    assert larger.tokens_per_batch == stage.tokens_per_batch  # never more than the stage's


def test_sequences_longer_than_the_length_are_cut_and_lose_their_mix():
    stage = PROLONG[512 * K]
    (small,) = probe_ladder(PROLONG, stage, length=16 * K, tokens=128 * K, steps=8).stages
    assert (small.seq_length, small.tokens_per_batch, small.mix) == (16 * K, 16 * K, None)
    assert (small.rope, small.lr, small.optimizer) == (stage.rope, stage.lr, "new")
    with pytest.raises(ValueError, match=r"--tokens is 1,000, and a sequence .* has 16,384"):
        probe_ladder(PROLONG, stage, length=16 * K, tokens=1000, steps=8)


@pytest.mark.parametrize(("gpus", "sequences"), [(1, 30), (8, 24), (16, 16), (32, 16)])
def test_a_step_has_sequences_that_the_gpus_can_share(gpus, sequences):
    stage = PROLONG[64 * K]
    tokens = 30 * 32 * 64 * K
    (small,) = probe_ladder(
        PROLONG, stage, length=64 * K, tokens=tokens, steps=32, gpus=gpus
    ).stages
    assert small.sequences_per_batch == sequences


@pytest.mark.parametrize(
    ("native", "length", "ends"),
    [
        (8192, 12_288, [2048, 4096, 8192, 12_288]),
        (8192, 65_536, [2048, 4096, 8192, 16_384, 32_768, 65_536]),
        (128, 256, [64, 128, 256]),
        (100, 192, [64, 128, 192]),
    ],
)
def test_ranges_of_positions_are_whole_buckets_up_to_and_beyond_the_native_context(
    native, length, ends
):
    assert range_ends(native, length, 64) == ends


def test_the_slope_and_its_error_are_those_of_least_squares():
    draw = random.Random(0)
    tokens = [1.0, 2.0, 3.5, 4.0, 7.0]
    losses = [3.0 - 0.2 * x + draw.gauss(0, 0.1) for x in tokens]
    coefficients, covariance = np.polyfit(tokens, losses, 1, cov=True)
    assert slope(tokens, losses) == pytest.approx((coefficients[0], math.sqrt(covariance[0, 0])))
    assert all(map(math.isnan, slope(tokens[:2], losses[:2])))


def reading(beyond: list[float], within: float = 1.0, native: float = 1.2) -> Reading:
    """Return a reading of documents whose last tokens cost `beyond` more given all of a window."""
    return Reading(
        contexts=(2048, 4096, NATIVE, 12_288),
        by_context=tuple((1.4, 1.3, native, native + cost) for cost in beyond),
        ranges=(
            (0, 4096, tuple(within for _ in beyond)),
            (4096, NATIVE, tuple(within for _ in beyond)),
            (NATIVE, 12_288, tuple(within + 0.3 for _ in beyond)),
        ),
    )


PUBLISHED = reading([1.2, 1.4, 1.3])
UNTRAINED = reading([0.4, 0.5, 0.6])


@pytest.mark.parametrize(
    ("after", "word", "certain"),
    [
        ([0.02, 0.03, 0.01], "extends readily", True),
        ([-0.3, 0.3, 0.0], "extends readily", False),
        ([0.20, 0.32, 0.40], "more tokens, or another base", True),
        ([0.41, 0.49, 0.61], "unlikely with this rotation", True),
        ([0.45, 0.52, 0.66], "unlikely with this rotation", True),
    ],
)
def test_the_verdict_follows_the_cost_of_reading_beyond_the_native_context(after, word, certain):
    found = verdict(PUBLISHED, UNTRAINED, reading(after), NATIVE)
    assert (found.word, found.certain, found.same_tokens) == (word, certain, True)
    assert found.cost.mean == pytest.approx(sum(after) / 3)
    assert found.cost_untrained.mean == pytest.approx(0.5)
    assert found.fell.mean == pytest.approx(0.5 - sum(after) / 3)
    assert f"costs {found.cost} nats" in found.why


def test_the_figures_of_a_real_model_give_the_verdict_that_its_page_states():
    """Means of docs/real_model.md: SmolLM2-135M given 8K and 12K tokens."""
    figures = {"own": (1.238, 2.541), "untrained": (1.254, 1.279), "trained": (1.208, 1.247)}
    own, untrained, trained = (
        reading([long - short], native=short) for short, long in figures.values()
    )
    found = verdict(own, untrained, trained, NATIVE)
    assert found.word == "extends readily"
    assert found.cost_published.mean == pytest.approx(1.303)
    assert not found.certain  # a single document leaves no error


def test_a_loss_within_the_native_context_that_rises_is_said():
    found = verdict(PUBLISHED, UNTRAINED, reading([0.01] * 3, within=1.2), NATIVE)
    assert found.word == "extends readily"
    assert "within 8,192 tokens the loss rose by +0.200 +- 0.000" in found.why


def test_a_base_that_ignores_the_context_costs_nothing_and_that_is_said():
    used = verdict(PUBLISHED, UNTRAINED, reading([0.01] * 3), NATIVE)
    assert "uses the context" not in used.why
    ignored = verdict(PUBLISHED, UNTRAINED, reading([0.0] * 3, native=1.4), NATIVE)
    assert ignored.word == "extends readily"
    assert "not shown: its gain from context is +0.000 +- 0.000" in ignored.why


def test_without_a_window_within_the_native_context_positions_are_compared():
    far = [
        replace(one, contexts=(16 * K, 32 * K), by_context=tuple((1.4, 1.1) for _ in range(3)))
        for one in (PUBLISHED, UNTRAINED, reading([0.0] * 3))
    ]
    found = verdict(*far, NATIVE)
    assert not found.same_tokens
    assert found.cost.mean == pytest.approx(0.3)  # of the ranges
    assert found.word == "unlikely with this rotation"


def test_an_estimate_exceeds_a_limit_by_two_errors_only():
    assert Estimate.of([0.1, 0.1, 0.13]).exceeds(0.05)
    assert not Estimate.of([0.0, 0.1, 0.2]).exceeds(0.05)
    assert Estimate.of([0.1]).exceeds(0.05)
    assert not Estimate.of([0.055]).exceeds(0.05)
