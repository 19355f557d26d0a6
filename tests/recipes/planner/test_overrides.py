# SPDX-License-Identifier: Apache-2.0
"""Overrides between two layouts apply to the recipe, and make of it what the planner counted."""

from dataclasses import replace

import fiddle as fdl
import pytest

from recipes.notation.layout import layout_from
from recipes.planner.overrides import override_words
from recipes.pretrain import pretrain
from recipes.resolved import overrides, read
from recipes.shipped.table import ROWS
from tests.recipes.planner.test_remedies import workload as of

ROW = ROWS["llama3_8b_nemo_64k"]
LAYOUTS = (
    "tp2 dp4 mb2",
    "ulysses8",
    "hybrid2x2 dp2 full offload-inputs:60 tile-loss",
    "tp2 pp2x4 dp2",
)

WANTED = (
    "tp2 head_chunked4 tile-loss",
    "tp4 dp2 full tile-mlp zero0",
    "ulysses8 kept_attention tile-loss tile-mlp offload-both:64.6 adam-on-host:0.5",
    "hybrid2x4 dp2 kept_attention offload-inputs:8.1 zero3",
    "tp2 pp2x4 dp2",
    "dp16 fp8:tensorwise",
)


@pytest.mark.parametrize("words", LAYOUTS)
@pytest.mark.parametrize("wanted", WANTED)
def test_overrides_make_the_layout_they_were_counted_for(words, wanted):
    before = of(words)
    after = replace(of(wanted), seq_length=before.seq_length // (1 + wanted.startswith("dp16")))
    recipe = pretrain(ROW.card, ROW.ladder, ROW.seq_length, before.layout)
    recipe = overrides.override(recipe, override_words(before, after))
    assert read.tokens_per_batch(recipe) == before.tokens_per_batch
    layout, strategy = after.layout, recipe.trainer.strategy
    assert read.world_size(recipe) == layout.world_size
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
    assert recipe.data.seq_length == after.seq_length


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


def test_words_of_the_same_job_are_none():
    assert override_words(of("tp2 dp4"), of("tp2 dp4")) == []


def test_words_divide_experts_and_join_them_again():
    row = ROWS["mixtral_8x7b_nemo_16k"]
    whole, divided = of("tp2 dp8", row), of("tp2 dp8 ep8 etp1", row)
    key = "trainer.strategy.expert"
    assert override_words(whole, divided) == [
        f"{key}_model_parallel_size=8", f"{key}_tensor_parallel_size=1",
    ]  # fmt: skip
    assert override_words(divided, whole) == [
        f"{key}_model_parallel_size=1", f"{key}_tensor_parallel_size=null",
    ]  # fmt: skip


def test_words_say_each_thing_that_differs():
    words = override_words(of("tp2 dp4 mb2"), of("tp4 hybrid2x2 dp2 full tile-mlp zero0"))
    assert words == [
        "trainer.strategy.tensor_model_parallel_size=4",
        "trainer.strategy.context_parallel_size=4",
        "trainer.num_nodes=4",
        "data.micro_batch_size=1",
        "model.config.cp.kind=hybrid",
        "model.config.cp.ulysses=2",
        "model.config.recompute.kind=full",
        "model.config.tiling.mlp=true",
        "trainer.strategy.ddp.use_distributed_optimizer=false",
        "trainer.strategy.ddp.overlap_param_gather=false",
        "optim.config.use_distributed_optimizer=false",
    ]
