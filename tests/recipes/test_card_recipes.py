# SPDX-License-Identifier: Apache-2.0
"""A recipe of every card: what it sets otherwise than NeMo, and Megatron's checks of its model."""

import dataclasses
import math
from typing import Any

import fiddle as fdl
import nemo_run as run
import pytest
import torch

from recipes.constraints.layers import evenly_full
from recipes.models import CARDS, TINY
from recipes.pretrain import pretrain
from recipes.shipped.factories import FACTORIES
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.units import K, M
from tests.recipes.test_cards import EACH, EACH_IN_NEMO, NEMO, listed, nemo_defaults

# What a recipe sets otherwise than NeMo's config of the same model, and why.
MEANT = {
    "seq_length": "the stage's",
    "vocab_size": "NeMo takes it from the tokenizer",
    "kv_channels": "NeMo divides hidden size by heads",
    "num_query_groups": "NeMo says none where there are as many as heads",
    "moe_ffn_hidden_size": "NeMo says none where it is the width of an MLP",
    "position_embedding_type": "rotation is ours",
    "rotary_base": "rotation is ours",
    "rotary_percent": "rotation is ours",
    "scale_factor": "rotation is ours",
    "low_freq_factor": "rotation is ours",
    "high_freq_factor": "rotation is ours",
    "old_context_len": "rotation is ours",
    "apply_rope_fusion": "rotation is ours",
    "cp_comm_type": "the layout's",
    "calculate_per_token_loss": "sum(loss) / sum(tokens) over context ranks",
    "cross_entropy_loss_fusion": "the plain one has the loss of each token",
    "forward_step_fn": "position ids reach every pipeline stage",
    "recompute_granularity": "the layout's",
    "recompute_method": "the layout's",
    "recompute_num_layers": "the layout's",
}
LADDER = Ladder(
    name="any",
    source="a test",
    stages=(
        Stage(
            seq_length=64 * K,
            rope="native",
            tokens=8 * M,
            tokens_per_batch=4 * M,
            lr=Cosine(peak=1e-5),
            start="card",
        ),
    ),
)


def recipe_of(card: ModelCard, **layout: Any) -> run.Partial:
    """Return a recipe at 64K with as many tensor ranks as divide the KV heads, up to a node's.

    It has two pipeline stages, if those do not cut the card's pattern.
    """
    tp = math.gcd(8, card.kv_heads)
    windowed = card.pattern is not None and card.pattern.window is not None
    pp = 1 if windowed and not evenly_full(card.pattern, card.layers, 2) else 2
    spread = Layout(tp=tp, cp=ContextParallel.ring(2), pp=pp, **layout)
    return pretrain(card, LADDER, 64 * K, spread)


@EACH_IN_NEMO
def test_a_recipe_departs_from_nemo_only_where_it_means_to(card):
    ours = fdl.ordered_arguments(recipe_of(card).model.config, include_defaults=True)
    departed = {
        field
        for field, default in nemo_defaults(card.config_class).items()
        if default is not dataclasses.MISSING and ours.get(field) != default
    }
    assert departed <= MEANT.keys() | listed(NEMO, card).keys()


@EACH
@pytest.mark.parametrize("on", ["cuda", "cpu"])
def test_the_model_of_a_recipe_passes_megatrons_checks(card, on):
    recipe = recipe_of(card, **({"device": "cpu", "precision": "fp32"} if on == "cpu" else {}))
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
    built = fdl.build(config)
    assert built.num_layers == card.layers
    assert built.num_moe_experts == (card.experts or None)
    assert built.seq_length == 64 * K


@pytest.mark.parametrize(("name", "coefficient"), [("mixtral_8x7b", 1e-2), ("qwen3_30b_a3b", 1e-3)])
def test_experts_are_balanced_by_nemos_coefficient(name, coefficient):
    config = fdl.build(recipe_of(CARDS[name], device="cpu", precision="fp32").model.config)
    assert config.moe_router_load_balancing_type == "aux_loss"
    assert config.moe_aux_loss_coeff == coefficient
    assert not config.moe_router_pre_softmax  # probabilities of the chosen experts add up to 1
    assert config.moe_shared_expert_intermediate_size is None


@pytest.mark.usefixtures("megatron_rank")
def test_parameters_are_those_of_the_model_that_is_built():
    config = fdl.build(FACTORIES["tiny_512"]().model.config)
    model = config.configure_model(tokenizer=None)
    matrices = [p.numel() for p in model.parameters() if p.dim() == 2]  # the head is the embedding
    assert sum(matrices) == TINY.matmul_parameters
    assert sum(p.numel() for p in model.parameters()) == TINY.parameters
