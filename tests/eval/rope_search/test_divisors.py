# SPDX-License-Identifier: Apache-2.0
"""A stretched rotation is the trained one up to the trained length and the divided one beyond."""

from dataclasses import replace

import pytest
import torch

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import inverse_frequencies
from eval.rope_search.divisors import Stretching
from eval.rope_search.evolution import Settings, search

HEAD_DIM, TRAINED, TARGET = 32, 2048, 8192
PLAIN = RopeScaling.base_change(40_000)
BEFORE = {"base": 40_000, "factor": 4.0, "original_length": 512}
ROTATIONS = {
    "plain": PLAIN,
    "half of each head": replace(PLAIN, partial_rotary_factor=0.5),
    "interleaved": replace(PLAIN, interleaved=True),
    "yarn": RopeScaling.yarn(**BEFORE),
    "llama3": RopeScaling.llama3(**BEFORE),
}
EVERY = pytest.mark.parametrize("rope", ROTATIONS.values(), ids=ROTATIONS)


def stretching(rope: RopeScaling) -> Stretching:
    return Stretching(rope, HEAD_DIM, trained=TRAINED, target=TARGET)


@EVERY
def test_the_start_turns_heads_as_yarn_does_at_its_temperature(rope):
    yarn = RopeScaling(
        method="yarn",
        base=rope.base,
        factor=TARGET / TRAINED,
        original_length=TRAINED,
        partial_rotary_factor=rope.partial_rotary_factor,
        interleaved=rope.interleaved,
        before=rope,
    )
    found = stretching(rope)
    started = found.by(found.start)
    assert started.interleaved == rope.interleaved
    torch.testing.assert_close(
        inverse_frequencies(started, HEAD_DIM, TARGET), inverse_frequencies(yarn, HEAD_DIM)
    )
    assert min(found.start) >= 1 - 1e-12
    assert found.start[-1] == pytest.approx(4)


@EVERY
def test_divisors_divide_the_trained_frequencies_beyond_the_trained_length_alone(rope):
    own, _ = inverse_frequencies(rope, HEAD_DIM)
    divisors = [1 + pair / 4 for pair in range(len(own))]
    found = stretching(rope).by(divisors)
    beyond, _ = inverse_frequencies(found, HEAD_DIM, TRAINED + 1)
    torch.testing.assert_close(beyond, own / torch.tensor(divisors, dtype=torch.float64))
    within, _ = inverse_frequencies(found, HEAD_DIM, TRAINED)
    torch.testing.assert_close(within, own)
    assert (found.reach, found.original_length) == (TARGET, TRAINED)


@EVERY
@pytest.mark.parametrize("target", [3000, 6144, 7 * TRAINED, 100_000])
def test_a_search_may_begin_at_the_start_whatever_the_factor(rope, target):
    found = Stretching(rope, HEAD_DIM, trained=TRAINED, target=target)
    searched = search(
        sum,
        start=found.start,
        critical=found.critical,
        factor=found.factor,
        settings=Settings(population=2, iterations=1),
    )
    assert searched.start_score == sum(found.start)


def test_a_rotation_stretched_before_turns_fewer_pairs_in_training():
    plain, stretched = stretching(PLAIN), stretching(ROTATIONS["yarn"])
    assert stretched.critical[-1] < plain.critical[-1]
    assert stretched.temperature == pytest.approx(plain.temperature**2)  # 4 times, twice


@pytest.mark.parametrize("target", [1024, 2048])
def test_a_target_within_the_trained_length_is_refused(target):
    with pytest.raises(ValueError, match=r"target is .* trained on 2,048; a search stretches"):
        Stretching(PLAIN, HEAD_DIM, trained=TRAINED, target=target)


def test_a_rotation_by_length_is_refused():
    with pytest.raises(ValueError, match="rotated by dynamic"):
        stretching(RopeScaling.dynamic(**BEFORE))
