# SPDX-License-Identifier: Apache-2.0
"""The record of a rotation in effect: its hash, its differences, and what was changed in it."""

import json
from dataclasses import replace

import pytest
import torch

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.in_effect import RotationInEffect
from custom_modules.rope.rotary import Rotation, stated_rotation
from tests.recipes.hugging_face.test_rope import ROTATIONS

HEAD_DIM, CPU = 32, torch.device("cpu")
YARN = RopeScaling.yarn(base=10_000, factor=16.0, original_length=4096)
KNOWN = "08baba3c182dbee6fba0761011ba3844e46317e442ef4b315540274bfd33fbb7"
"""Of YARN with heads of 32 dimensions; it must not change with a library or a Python version."""


@pytest.mark.parametrize("rope", ROTATIONS.values(), ids=ROTATIONS)
def test_the_module_uses_what_is_stated_and_the_record_comes_back_from_json(rope):
    used = Rotation(rope, HEAD_DIM).in_effect(2048, CPU, interleaved=rope.interleaved)
    stated = stated_rotation(rope, HEAD_DIM, 2048)
    assert used.difference(stated) == ""
    assert used.sha256 == stated.sha256
    assert RotationInEffect.from_dict(json.loads(json.dumps(used.to_dict()))) == used


def test_the_hash_is_of_nine_digits_and_the_same_everywhere():
    found = stated_rotation(YARN, HEAD_DIM, 65_536)
    assert found.sha256 == KNOWN
    last_digits = replace(found, frequencies=tuple(f * (1 + 1e-15) for f in found.frequencies))
    assert last_digits.sha256 == found.sha256
    for change in (
        {"frequencies": tuple(f * (1 + 1e-7) for f in found.frequencies)},
        {"temperature": found.temperature * (1 + 1e-7)},
        {"interleaved": True},
        {"head_dim": 64},
        {"length": 65_536},
        {"long_above": 4096},
    ):
        assert replace(found, **change).sha256 != found.sha256, change


def test_only_rotations_by_length_depend_on_it():
    for rope in ROTATIONS.values():
        short, long = (stated_rotation(rope, HEAD_DIM, length) for length in (512, 2048))
        assert (short.sha256 == long.sha256) == (rope.method != "dynamic")
    both = stated_rotation(ROTATIONS["longrope"], HEAD_DIM, 2048)
    assert both.long_above == 512
    assert both.frequencies != both.long_frequencies


def test_a_difference_names_the_pair_and_both_wavelengths():
    eight = stated_rotation(replace(YARN, factor=8.0), HEAD_DIM, 65_536)
    sixteen = stated_rotation(YARN, HEAD_DIM, 65_536)
    said = eight.difference(sixteen)
    assert said == "pair 16 of 16 turns once in 282,664 tokens instead of 565,327"
    cooler = replace(sixteen, temperature=1.0)
    assert cooler.difference(sixteen) == "the temperature is 1 instead of 1.27726"
    assert replace(sixteen, interleaved=True).difference(sixteen) == (
        "interleaved is True instead of False"
    )
    fewer = replace(sixteen, frequencies=sixteen.frequencies[:8])
    assert fewer.difference(sixteen) == "8 pairs turn instead of 16"
    longrope = stated_rotation(ROTATIONS["longrope"], HEAD_DIM, 2048)
    other = replace(longrope, long_frequencies=longrope.frequencies)
    assert other.difference(longrope).endswith("in sequences above 512 tokens")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": 1.5}, "its sha256 is"),
        ({"frequencies": []}, "its sha256 is"),
        ({"frequencies": [0.0]}, "0.0 is not a number above 0"),
        ({"frequencies": "1.0"}, "'1.0' is not a list of numbers"),
        ({"sha256": 7}, "its sha256 is 7 and that of its values"),
        ({"head_dim": None}, "NoneType"),
    ],
)
def test_a_changed_record_is_refused(change, said):
    content = stated_rotation(YARN, HEAD_DIM, 65_536).to_dict()
    with pytest.raises(ValueError, match=said):
        RotationInEffect.from_dict(content | change)
    with pytest.raises(ValueError, match="it has no frequencies"):
        RotationInEffect.from_dict({"sha256": ""})
    with pytest.raises(ValueError, match="expected an object"):
        RotationInEffect.from_dict([])
