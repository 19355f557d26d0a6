# SPDX-License-Identifier: Apache-2.0
import pytest

from custom_modules.rope.config import RopeScaling
from recipes.notation.rope import rope_from

OF_MODEL = {"base": 500_000, "partial_rotary_factor": 1.0, "original_length": 8192}


@pytest.mark.parametrize(
    ("word", "rope"),
    [
        ("default:base=8e6", RopeScaling.base_change(8_000_000)),
        ("default", RopeScaling.base_change(500_000)),
        ("ntk:factor=8", RopeScaling.ntk(base=500_000, factor=8, original_length=8192)),
        (
            "yarn:factor=8,original_length=131072,truncate=False,beta_fast=4",
            RopeScaling(
                method="yarn",
                base=500_000,
                factor=8,
                original_length=131_072,
                truncate=False,
                beta_fast=4,
            ),
        ),
    ],
)
def test_a_word_names_a_method_and_what_differs_from_the_model(word, rope):
    assert rope_from(word, OF_MODEL) == rope


def test_a_word_may_stretch_the_models_own_rotation_from_the_context_it_was_trained_at():
    own = RopeScaling.llama3()
    expected = RopeScaling.yarn(base=500_000, factor=8, original_length=131_072, before=own)
    stated = "yarn:factor=8,original_length=131072,before=own"
    assert rope_from(stated, OF_MODEL, own=own) == expected
    assert rope_from("yarn:factor=8,before=own", OF_MODEL, own=own, trained=131_072) == expected
    with pytest.raises(ValueError, match="has no original_length, the context in tokens that"):
        rope_from("yarn:factor=8,before=own", OF_MODEL, own=own)


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("yarm:factor=8", "'yarm' is unknown; choose default"),
        ("yarn:factor", r"'factor' of 'yarn:factor' is not KEY=VALUE, as factor=8"),
        ("yarn:factor=many", "factor is 'many'; it takes a number"),
        ("yarn:betafast=8", r"no 'betafast'; did you mean beta_fast\?"),
        ("yarn:factor=0.5", "factor is 0.5; it must be at least 1"),
        ("yarn:factor=2,before=theirs", "before is 'theirs'; it must be own"),
        ("default:factor=2", "factor has no effect on RoPE method default"),
        ("yarn:factor=2,factor=3", "states factor twice"),
        ("yarn:factor=true", "factor is True; it takes a number"),
        ("yarn:factor=null", "factor is None; it takes a number"),
        ('yarn:factor="8"', "factor is '8'; it takes a number"),
        ("yarn:factor=2,beta_fast=Infinity", "beta_fast is inf"),
        ("yarn:factor=2,original_length=8192.5", "it takes a whole number of tokens"),
        ("yarn:factor=2,truncate=7", "truncate is 7; it is true or false"),
        ("longrope:factor=2,short_factor=2,long_factor=2", "short_factor"),
        ("missing.json", "missing.json"),
    ],
)
def test_a_word_that_names_no_rotation_is_refused(word, words):
    with pytest.raises(ValueError, match=words):
        rope_from(word, OF_MODEL)
