# SPDX-License-Identifier: Apache-2.0
"""Constraints of an interleaved pipeline, each broken once."""

import re
from dataclasses import replace

import pytest

from custom_modules.memory.config import Offload, Recompute
from recipes.constraints import shapes, violations
from tests.recipes.constraints.test_violations import FITS


def test_an_interleaved_pipeline_that_fits_violates_no_constraint():
    assert list(violations.violations(replace(FITS, vpp=4))) == []
    uneven = replace(FITS, layers=126, pp=2, vpp=8)
    assert list(violations.violations(uneven)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"vpp": 3},
            "32 layers are not divisible by PP 2 x VPP 3, nor are 34 .*; VPP may be 1, 2, 4, 8 or",
        ),
        ({"vpp": 2, "pp": 1}, "VPP is 2 and PP 1; .* take PP 2 or more"),
        (
            {"vpp": 2, "global_batch": 24},
            "3 micro-batches of a data rank are not a multiple of PP 2",
        ),
        ({"vpp": 2, "recompute": Recompute(kind="block", layers=2)}, "recompute block counts"),
        (
            {"vpp": 2, "offload": Offload(tensors="inputs", cap_gib=1)},
            "offload inputs with an interleaved pipeline: each chunk would pin",
        ),
        (
            {"vpp": 2, "ends_count": True},
            "32 layers on PP 2 x VPP 2 are divisible by it, .*_pipeline_split=false",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_an_interleaved_pipeline_that_cannot_be_is_one_sentence(change, words):
    (sentence,) = shapes.violations(replace(FITS, **change))
    assert re.search(words, sentence)
