# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.frequency_report import frequency_bands

OWN = RopeScaling.base_change(10_000)


def stretched(rope: RopeScaling, **given):
    return frequency_bands(OWN, rope, 32, **{"trained": 512, "length": 2048, **given})


def test_the_models_own_rotation_knows_the_distances_that_it_was_trained_at():
    found = stretched(OWN)
    assert found.largest_distance == 512
    assert found.kept == list(range(16))
    assert found.between == found.interpolated == []


def test_position_interpolation_stretches_every_pair_and_the_distance_by_the_factor():
    found = stretched(RopeScaling.linear(base=10_000, factor=4.0, original_length=512))
    assert found.largest_distance == 2048
    assert found.interpolated == list(range(16))
    assert found.wavelengths[0] == pytest.approx(8 * math.pi)


def test_yarn_keeps_fast_pairs_and_reaches_the_whole_distance():
    found = stretched(RopeScaling.yarn(base=10_000, factor=4.0, original_length=512))
    assert found.largest_distance == pytest.approx(2048)
    assert found.kept[0] == 0
    assert found.interpolated[-1] == 15
    assert sorted(found.kept + found.between + found.interpolated) == list(range(16))
    assert found.temperature == pytest.approx(0.1 * math.log(4) + 1)


def test_ntk_falls_short_of_its_factor_in_the_first_long_pair():
    # By hand: pair 8 is the first to turn less than once in 512 tokens (wavelength 628), and
    # NTK-aware scaling divides it by 4 ** (8 / 15).
    found = stretched(RopeScaling.ntk(base=10_000, factor=4.0, original_length=512))
    assert found.largest_distance == pytest.approx(512 * 4 ** (8 / 15))


def test_every_distance_is_known_where_all_pairs_turn_within_training():
    found = frequency_bands(OWN, OWN, 32, trained=100_000, length=200_000)
    assert found.largest_distance == math.inf


def test_methods_that_go_by_length_are_looked_at_at_the_length():
    dynamic = RopeScaling.dynamic(base=10_000, factor=4.0, original_length=512)
    assert stretched(dynamic, length=512).kept == list(range(16))
    assert stretched(dynamic, length=2048).kept == [0]


def test_rotations_of_other_dimensions_are_refused():
    half = RopeScaling(method="default", base=10_000, partial_rotary_factor=0.5)
    with pytest.raises(ValueError, match=r"turns 32 dimensions of a head and default 16"):
        stretched(half)
