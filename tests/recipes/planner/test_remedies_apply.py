# SPDX-License-Identifier: Apache-2.0
"""Every remedy's words apply to the recipe, and make of it what the planner has counted."""

import fiddle as fdl
import pytest

from recipes.notation.layout import layout_from
from recipes.planner.plan import plan
from recipes.planner.remedies.climb import remedies
from recipes.planner.remedies.overrides import override_words
from recipes.planner.workload import Workload
from recipes.pretrain import pretrain
from recipes.resolved import overrides, read
from recipes.shipped.table import ROWS
from recipes.spec import cluster

ROW = ROWS["llama3_8b_nemo_64k"]
H100 = cluster.load("dgx_h100")
LAYOUTS = (
    "tp2 dp4 mb2",
    "ulysses8",
    "hybrid2x2 dp2 full offload-inputs:60 tile-loss",
    "tp2 pp2x4 dp2",
)


def of(words: str) -> Workload:
    return Workload(
        card=ROW.card,
        seq_length=ROW.seq_length,
        tokens_per_batch=ROW.stage.tokens_per_batch,
        layout=layout_from(words),
        gpus_per_node=8,
    )


def found(words: str):
    return remedies(plan(of(words), H100)).ladder


@pytest.mark.parametrize("words", LAYOUTS)
def test_each_remedy_applies_and_is_the_layout_it_was_counted_for(words):
    applied = [one for one in found(words) if one.words]
    assert len(applied) >= 8
    for remedy in applied:
        recipe = pretrain(ROW.card, ROW.ladder, ROW.seq_length, layout_from(words))
        recipe = overrides.override(recipe, remedy.words)
        layout, strategy = remedy.alone.workload.layout, recipe.trainer.strategy
        assert read.world_size(recipe) == layout.world_size, remedy.name
        assert strategy.tensor_model_parallel_size == layout.tp
        assert (read.layout_of(recipe).pp, read.layout_of(recipe).vpp) == (layout.pp, layout.vpp)
        assert strategy.context_parallel_size == layout.cp.size
        assert fdl.build(recipe.model.config.cp) == layout.cp.how
        assert fdl.build(recipe.model.config.recompute) == layout.recompute
        assert fdl.build(recipe.model.config.tiling) == layout.tiling
        assert fdl.build(recipe.model.config.offload) == layout.offload
        assert read.sharding_of(recipe) == layout.sharding
        assert read.fp8(recipe) == layout.fp8
        assert recipe.optim.config.optimizer_offload_fraction == layout.optimizer_offload
        assert recipe.data.micro_batch_size == layout.micro_batch
        assert recipe.data.seq_length == remedy.alone.workload.seq_length
        assert read.tokens_per_batch(recipe) == remedy.alone.workload.tokens_per_batch


@pytest.mark.parametrize("words", ["fp8:tensorwise:1,2", "fp8:blockwise"])
def test_the_words_of_fp8_say_which_layers_stay_in_bf16(words):
    before, after = of("ulysses8"), of(f"ulysses8 {words}")
    recipe = pretrain(ROW.card, ROW.ladder, ROW.seq_length, before.layout)
    overrides.override(recipe, override_words(before, after))
    assert read.fp8(recipe) == after.layout.fp8


def test_words_of_a_key_that_is_not_there_are_refused():
    recipe = pretrain(ROW.card, ROW.ladder, ROW.seq_length, layout_from("ulysses8"))
    with pytest.raises(ValueError, match=r"model\.config\.tilings"):
        overrides.override(recipe, ["model.config.tilings.mlp=true"])
