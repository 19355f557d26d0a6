# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from importlib.util import find_spec

import fiddle as fdl
import nemo_run as run
import pytest
import torch

from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.shipped import llama31_8b_nemo_64k
from recipes.shipped.factories import FACTORIES
from recipes.shipped.table import ROWS
from recipes.spec import cluster
from recipes.spec.naming import length_word
from recipes.spec.units import K, M
from tests.recipes.support.chosen_rows import chosen, family_and_layout


@pytest.mark.parametrize(
    ("tokens", "word"),
    [(512, "512"), (1536, "1536"), (2 * K, "2k"), (K * K + K, "1025k"), (4 * M, "4m")],
)
def test_a_length_is_named_exactly(tokens, word):
    assert length_word(tokens) == word


def test_every_ladder_of_a_card_has_a_row_for_each_stage():
    ladders = {(row.card.name, row.ladder.name): row.ladder for row in ROWS.values()}
    for (card, name), ladder in ladders.items():
        lengths = [
            row.seq_length
            for row in ROWS.values()
            if (row.card.name, row.ladder.name, row.variant) == (card, name, "")
        ]
        assert lengths == [stage.seq_length for stage in ladder.stages]


IN_FP8 = [row for row in ROWS.values() if row.variant == "fp8"]


def test_a_variant_lays_out_a_stage_that_has_a_row_in_another_way():
    variants = {name: row for name, row in ROWS.items() if row.variant}
    assert "llama31_8b_nemo_64k_on_1xh100" in variants
    for name, row in variants.items():
        first = ROWS[name.removesuffix(f"_{row.variant}")]
        assert (row.stage, row.stage_name) == (first.stage, first.name)
        assert row.layout != first.layout
        assert bool(row.pinned) != bool(row.variant_source)
        assert row.source.endswith(row.pinned or f"; {row.variant_source}")
        assert FACTORIES[name]().log.name == first.name  # its folder in a run


def test_a_row_in_fp8_has_a_first_row_in_bf16():
    assert len(IN_FP8) >= 8
    for row in IN_FP8:
        assert ROWS[row.stage_name].layout.fp8.recipe == "none" != row.layout.fp8.recipe


def test_the_recipe_of_a_row_in_fp8_differs_from_the_one_in_bf16_in_its_layout_alone():
    row = ROWS["llama31_8b_nemo_64k_fp8"]  # the planner lays both out the same way
    recipe, in_bf16 = row(), ROWS["llama31_8b_nemo_64k"]()
    assert recipe.trainer.plugins.fp8_recipe == "blockwise"
    recipe.trainer.plugins = in_bf16.trainer.plugins
    for one in (recipe, in_bf16):  # of the planned seconds of a step
        one.log.ckpt.every_n_train_steps = one.trainer.callbacks = None
    assert recipe == in_bf16


def test_a_row_is_called_for_its_recipe():
    recipe = llama31_8b_nemo_64k(nodes=4)
    assert isinstance(recipe, run.Partial)
    assert recipe == FACTORIES["llama31_8b_nemo_64k"](nodes=4)
    assert (recipe.trainer.num_nodes, recipe.log.name) == (4, "llama31_8b_nemo_64k")
    assert llama31_8b_nemo_64k().trainer.num_nodes == llama31_8b_nemo_64k.nodes


def test_more_nodes_are_more_data_ranks():
    row = ROWS["llama31_8b_nemo_64k"]
    assert row.on(4).dp == 4 * row.layout.dp
    assert row.on(4).world_size == 4 * row.layout.world_size


def test_nodes_that_hold_no_whole_replica_are_refused():
    row = ROWS["llama31_8b_nemo_64k"]
    two_nodes = replace(row, nodes=2, layout=replace(row.layout, dp=1))
    with pytest.raises(ValueError, match="takes 8 ranks a replica; 1 nodes of 4"):
        two_nodes.on(1)


def test_cpu_ranks_are_spread_over_nodes():
    row = ROWS["tiny_2k"]
    assert row.on(2) == row.layout


def built_config(recipe):
    """Return the real config of a recipe's model, checked by Megatron as it is built."""
    config, strategy = recipe.model.config, recipe.trainer.strategy
    for name in (  # as NeMo's strategy hands them over
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "sequence_parallel",
    ):
        setattr(config, name, getattr(strategy, name))
    config.pipeline_dtype = torch.bfloat16
    config.moe_permute_fusion = False  # asks for Transformer Engine to be installed
    return fdl.build(config)


@pytest.mark.parametrize("name", chosen(family_and_layout))
def test_the_layout_of_every_row_passes_megatrons_checks(name):
    row = ROWS[name]
    config = built_config(FACTORIES[name]())
    assert config.num_layers == row.card.layers
    assert config.tensor_model_parallel_size == row.layout.tp
    assert config.context_parallel_size == row.layout.cp.size


NEMO_HAS = [
    ("llama3_8b", "16k"), ("llama3_8b", "64k"), ("llama3_8b", "128k"),
    ("llama3_70b", "16k"), ("llama3_70b", "64k"),
    ("mixtral_8x7b", "16k"), ("mixtral_8x7b", "64k"), ("mixtral_8x22b", "64k"),
    ("nemotron3_22b", "16k"), ("nemotron3_22b", "64k"),
    ("nemotron4_15b", "16k"), ("nemotron4_15b", "64k"),
]  # fmt: skip
"""Its long-context recipes, in `nemo.collections.llm.recipes`."""


@pytest.mark.parametrize(("card", "length"), NEMO_HAS)
def test_each_long_context_recipe_of_nemo_has_a_row(card, length):
    assert find_spec(f"nemo.collections.llm.recipes.{card}_{length}")
    assert f"{card}_nemo_{length}" in ROWS


def test_each_size_that_llama_2_long_has_published_weights_of_has_a_row():
    there = {row.card.name for row in ROWS.values() if row.ladder.name.startswith("llama2_long")}
    assert there == {"llama2_7b", "llama2_13b", "llama2_70b"}


UNLISTED = [
    (card, ladder.name)
    for ladder in LADDERS.values()
    for card in ladder.cards
    if (card, ladder.name) not in {(row.card.name, row.ladder.name) for row in ROWS.values()}
]


def of_each_family() -> list:
    """Return the smallest card of each family, the larger ones for the nightly run."""
    few, by_size = {}, sorted(UNLISTED, key=lambda pair: CARDS[pair[0]].matmul_parameters)
    for pair in by_size:
        few.setdefault(CARDS[pair[0]].family, pair)
    return [
        pytest.param(*pair, marks=() if pair in few.values() else pytest.mark.nightly)
        for pair in UNLISTED
    ]


@pytest.mark.parametrize(("card", "ladder"), of_each_family())
def test_what_the_planner_chooses_for_other_cards_of_a_ladder_passes_them_too(card, ladder):
    from recipes.planner.search.ranking import search
    from recipes.planner.search.request import of_stage
    from recipes.pretrain import pretrain
    from recipes.spec.layout import Fp8

    stage, machine = LADDERS[ladder].stages[-1], cluster.load("dgx_h100")
    for nodes in (1, 2, 4, 8, 16, 32, 64, 128):
        asked = of_stage(CARDS[card], stage, machine, gpus=8 * nodes, fp8=Fp8())
        found = search(asked).plans
        if found:
            layout = found[0].workload.layout
            recipe = pretrain(CARDS[card], LADDERS[ladder], stage.seq_length, layout, nodes=nodes)
            assert built_config(recipe).num_layers == CARDS[card].layers
            return
    pytest.fail(f"{card} on {ladder} fits no cluster")
