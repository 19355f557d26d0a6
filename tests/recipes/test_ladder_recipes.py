# SPDX-License-Identifier: Apache-2.0
"""A ladder's figures in the recipe that NeMo runs, for one card of each."""

import fiddle as fdl
import pytest

from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.nemo2.lr_schedule import WarmupCosine, WarmupLinear
from recipes.pretrain import pretrain
from recipes.resolved.read import tokens_per_batch
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.stage import Linear

STAGES = [
    pytest.param(ladder, stage, id=f"{ladder.name}-{stage.seq_length}")
    for ladder in LADDERS.values()
    for stage in ladder.stages
]


@pytest.mark.parametrize(("ladder", "stage"), STAGES)
def test_a_stage_becomes_a_checked_recipe_with_its_own_figures(ladder, stage):
    card = CARDS[ladder.cards[0]]
    recipe = pretrain(card, ladder, stage.seq_length, Layout(cp=ContextParallel.ring(2)))

    assert recipe.trainer.max_steps == stage.steps
    assert tokens_per_batch(recipe) == stage.tokens_per_batch
    assert recipe.data.documents == stage.documents
    optimizer = recipe.optim.config
    assert optimizer.lr == stage.lr.peak
    assert (optimizer.weight_decay, optimizer.adam_beta2) == (stage.weight_decay, stage.adam_beta2)
    schedule = recipe.optim.lr_scheduler
    line = isinstance(stage.lr, Linear)
    assert fdl.get_callable(schedule) is (WarmupLinear if line else WarmupCosine)
    assert schedule.warmup_ratio == stage.lr.warmup_ratio
    assert schedule.final_ratio == stage.lr.final_ratio
    rope = card.native_rope if stage.rope == "native" else stage.rope
    assert fdl.build(recipe.model.config.rope) == rope
