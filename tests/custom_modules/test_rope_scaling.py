# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from custom_modules.rope_scaling import RopeScaling


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "dynamic"}, "'dynamic' is unknown; choose default, llama3 or yarn"),
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


@pytest.mark.parametrize(
    "scaling", [RopeScaling.base_change(10_000), RopeScaling.llama3()], ids=lambda s: s.method
)
def test_other_methods_have_no_temperature(scaling):
    assert scaling.temperature == 1.0
