# SPDX-License-Identifier: Apache-2.0
import json
import math
from dataclasses import replace
from typing import get_args

import pytest

from custom_modules.rope.config import RopeMethod, RopeScaling

PLAIN = RopeScaling.base_change(10_000)
EVERY_METHOD = {
    "default": PLAIN,
    "linear": RopeScaling.linear(base=10_000, factor=4.0, original_length=512),
    "ntk": RopeScaling.ntk(base=10_000, factor=4.0, original_length=512),
    "dynamic": RopeScaling.dynamic(base=10_000, factor=4.0, original_length=512),
    "ntk_by_parts": RopeScaling.ntk_by_parts(base=10_000, factor=4.0, original_length=512),
    "yarn": RopeScaling(
        method="yarn", base=10_000, factor=4.0, original_length=512, mscale=0.7, mscale_all_dim=1.1
    ),
    "llama3": RopeScaling.llama3(),
    "longrope": RopeScaling(
        method="longrope",
        base=10_000,
        factor=4.0,
        original_length=512,
        short_factor=[1.0, 1.5],
        long_factor=[1.0, 3.0],
    ),
    "yarn on llama3, part of each head, interleaved": RopeScaling(
        method="yarn",
        base=500_000,
        factor=8.0,
        original_length=131_072,
        partial_rotary_factor=0.5,
        interleaved=True,
        before=RopeScaling(
            method="llama3",
            base=500_000,
            factor=8.0,
            original_length=8192,
            partial_rotary_factor=0.5,
            interleaved=True,
        ),
    ),
}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "dynamik"}, "'dynamik' is unknown; choose default, linear, .* or longrope"),
        ({"method": "default", "base": math.inf}, "base is inf"),
        ({"method": "default", "partial_rotary_factor": 0.0}, "it is a share, above 0"),
        ({"method": "default", "partial_rotary_factor": 1.5}, "it is a share, above 0"),
        ({"method": "linear", "factor": 4.0}, "linear needs original_length"),
        ({"method": "linear", "factor": math.inf, "original_length": 8}, "factor is inf"),
        ({"method": "linear", "original_length": 8, "truncate": False}, "truncate has no effect"),
        ({"method": "dynamic", "original_length": 8, "before": PLAIN}, "before has no effect"),
        ({"method": "ntk_by_parts", "original_length": 8, "mscale": 1.0}, "mscale has no effect"),
        ({"method": "yarn", "original_length": 64, "mscale": 0.0}, "mscale is 0.0"),
        ({"method": "longrope", "original_length": 8}, "needs short_factor and long_factor"),
        (
            {"method": "longrope", "original_length": 8, "short_factor": [1.0], "long_factor": []},
            "short_factor has 1 numbers and long_factor 0",
        ),
        (
            {
                "method": "longrope",
                "original_length": 8,
                "short_factor": [1.0],
                "long_factor": [-2.0],
            },
            "factor of longrope is -2.0",
        ),
        (
            {
                "method": "longrope",
                "original_length": 1,
                "factor": 2.0,
                "short_factor": [1.0],
                "long_factor": [2.0],
            },
            "state attention_factor",
        ),
        (
            {
                "method": "yarn",
                "original_length": 8,
                "before": RopeScaling.dynamic(base=10_000, factor=2.0, original_length=8),
            },
            "yarn cannot stretch dynamic",
        ),
        (
            {"method": "yarn", "original_length": 8, "before": RopeScaling.base_change(500_000)},
            "base is 10000 and that of the rotation it is stretched from 500000",
        ),
        ({"method": "default", "base": 1.0}, "base is 1.0"),
        ({"method": "default", "base": math.nan}, "base is nan"),
        ({"method": "default", "factor": 4.0}, "factor has no effect on RoPE method default"),
        ({"method": "yarn", "factor": 0.5, "original_length": 512}, "factor is 0.5"),
        ({"method": "yarn", "factor": math.nan, "original_length": 512}, "factor is nan"),
        ({"method": "yarn", "factor": 4.0}, "yarn needs original_length"),
        ({"method": "yarn", "factor": 4.0, "original_length": 0}, "got 0"),
        ({"method": "llama3", "beta_fast": 16.0}, "beta_fast has no effect"),
        (
            {"method": "yarn", "original_length": 64, "beta_fast": 1.0, "beta_slow": 2.0},
            "ramp runs from the larger",
        ),
        (
            {"method": "llama3", "original_length": 64, "high_freq_factor": 0.5},
            "the first must be the larger",
        ),
        (
            {"method": "yarn", "original_length": 64, "attention_factor": -1.0},
            "attention_factor is -1.0",
        ),
        ({"method": "llama3", "factor": 8.0}, "llama3 needs original_length"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_outside_the_domain_of_the_method_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        RopeScaling(**{"base": 10_000, **arguments})


@pytest.mark.parametrize("factor", [1.0, 4.0, 64.0])
def test_yarn_has_the_temperature_of_the_paper(factor):
    scaling = RopeScaling.yarn(base=10_000, factor=factor, original_length=512)
    assert scaling.temperature == 0.1 * math.log(factor) + 1


def test_a_stated_attention_factor_replaces_the_temperature_of_the_paper():
    scaling = RopeScaling(
        method="yarn", base=10_000, factor=4.0, original_length=512, attention_factor=1.0
    )
    assert scaling.temperature == 1.0


@pytest.mark.parametrize("mscales", [{}, {"mscale": 1.0}, {"mscale_all_dim": 1.0}], ids=str)
def test_one_mscale_alone_leaves_the_temperature_of_the_paper(mscales):
    scaling = RopeScaling(method="yarn", base=10_000, factor=4.0, original_length=512, **mscales)
    assert scaling.temperature == 0.1 * math.log(4) + 1


def test_both_mscales_at_1_switch_the_temperature_off():
    scaling = RopeScaling(
        method="yarn", base=10_000, factor=4.0, original_length=512, mscale=1.0, mscale_all_dim=1.0
    )
    assert scaling.temperature == 1.0


@pytest.mark.parametrize(
    "method", ["default", "linear", "ntk", "dynamic", "ntk_by_parts", "llama3"]
)
def test_other_methods_have_no_temperature(method):
    assert EVERY_METHOD[method].temperature == 1.0


def test_longrope_has_the_temperature_of_its_paper_unless_stated():
    scaling = EVERY_METHOD["longrope"]
    assert scaling.temperature == math.sqrt(1 + math.log(4) / math.log(512))
    assert replace(scaling, attention_factor=1.0).temperature == 1.0


def test_every_method_is_among_those_tested():
    assert {scaling.method for scaling in EVERY_METHOD.values()} == set(get_args(RopeMethod))


@pytest.mark.parametrize("scaling", EVERY_METHOD.values(), ids=EVERY_METHOD)
def test_a_description_makes_the_same_rotation_again(scaling):
    assert RopeScaling.from_dict(json.loads(json.dumps(scaling.to_dict()))) == scaling


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"method": "yarn", "base": 1e4, "betas": 3}, "has no 'betas'; it has .*beta_fast"),
        ({"base": 1e4}, "needs method; got base"),
        ({}, "needs method; got nothing"),
    ],
)
def test_a_description_of_something_else_is_refused(content, words):
    with pytest.raises(ValueError, match=words):
        RopeScaling.from_dict(content)


def test_the_reach_is_the_context_that_the_method_stretches_to():
    assert EVERY_METHOD["linear"].reach == 2048
    assert PLAIN.reach is None
