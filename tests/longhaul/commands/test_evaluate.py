# SPDX-License-Identifier: Apache-2.0
"""`longhaul evaluate`: the ranges of positions that it takes where none are named."""

from pathlib import Path

import pytest

from custom_modules.rope.config import RopeScaling
from eval.base_model import BASE, BaseModel
from eval.run_folder import BUCKET
from longhaul.commands.evaluate import with_context_of


@pytest.mark.parametrize(
    ("context", "ends"),
    [
        (4 * BUCKET, [2 * BUCKET, 4 * BUCKET, 8 * BUCKET]),
        (2 * BUCKET, [2 * BUCKET, 8 * BUCKET]),
        (16 * BUCKET, [2 * BUCKET, 8 * BUCKET]),
        (BUCKET + 1, [2 * BUCKET, 8 * BUCKET]),
    ],
    ids=["between", "the same", "beyond", "no whole bucket"],
)
def test_a_range_ends_where_the_context_of_the_base_model_does(context, ends):
    base = BaseModel(BASE, Path("x"), Path("x"), RopeScaling.base_change(10_000), context)
    assert with_context_of(base, [2 * BUCKET, 8 * BUCKET]) == ends
