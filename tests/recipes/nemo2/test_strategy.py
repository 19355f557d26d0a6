# SPDX-License-Identifier: Apache-2.0
"""The dtype in which the parameters of a model are made."""

import fiddle as fdl
import pytest
import torch

from recipes.shipped.factories import recipe_named


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("32", torch.float32)]
)
def test_parameters_are_made_in_the_dtype_that_they_are_trained_in(precision, dtype):
    recipe = recipe_named("tiny_512")
    recipe.trainer.plugins.precision = precision
    trainer, model = fdl.build(recipe.trainer), fdl.build(recipe.model)
    trainer.strategy.connect(model)
    assert model.config.params_dtype == dtype
    assert model.config.bf16 == (dtype == torch.bfloat16)
