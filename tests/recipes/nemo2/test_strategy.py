# SPDX-License-Identifier: Apache-2.0
"""What the strategy sets in a model: the dtype of its parameters, the groups of its experts."""

import fiddle as fdl
import pytest
import torch

from recipes.nemo2.settings import shard
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


@pytest.mark.parametrize(("sharding", "apart"), [("optimizer", True), ("parameters", False)])
def test_experts_are_apart_but_for_megatron_fsdp_which_has_no_groups_for_them(sharding, apart):
    recipe = recipe_named("mixtral_8x7b_nemo_16k")
    shard(recipe, sharding)
    recipe.trainer.strategy.pipeline_model_parallel_size = 1  # else the trainer sets its dtype
    strategy, model = fdl.build(recipe.trainer.strategy), fdl.build(recipe.model)
    strategy.connect(model)
    assert model.config.experts_apart == apart
