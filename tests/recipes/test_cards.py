# SPDX-License-Identifier: Apache-2.0
import dataclasses
import importlib
from typing import Any

import fiddle as fdl
import pytest

from recipes.factories import FACTORIES
from recipes.models import CARDS, LLAMA31_8B, LLAMA32_1B, TINY

PUBLISHED = [card for card in CARDS.values() if card.hf_id is not None]  # tiny is ours alone
EACH_PUBLISHED = pytest.mark.parametrize("card", PUBLISHED, ids=lambda card: card.name)

# What a recipe sets otherwise than NeMo's config of the same model, and why.
MEANT = {
    "seq_length": "the stage's",
    "vocab_size": "NeMo takes it from the tokenizer",
    "kv_channels": "NeMo divides hidden size by heads",
    "position_embedding_type": "rotation is ours",
    "rotary_base": "rotation is ours",
    "scale_factor": "rotation is ours",
    "low_freq_factor": "rotation is ours",
    "high_freq_factor": "rotation is ours",
    "old_context_len": "rotation is ours",
    "apply_rope_fusion": "rotation is ours",
    "calculate_per_token_loss": "sum(loss) / sum(tokens) over context ranks",
    "cross_entropy_loss_fusion": "the plain one has the loss of each token",
    "forward_step_fn": "position ids reach every pipeline stage",
    "recompute_granularity": "the layout's",
    "recompute_method": "the layout's",
    "recompute_num_layers": "the layout's",
}


def nemo_defaults(dotted_name: str) -> dict[str, Any]:
    """Return the fields of NeMo's config class; building one needs Transformer Engine."""
    module, _, name = dotted_name.rpartition(".")
    owner = getattr(importlib.import_module(module), name)
    return {field.name: field.default for field in dataclasses.fields(owner)}


@EACH_PUBLISHED
def test_a_card_states_what_nemo_states(card):
    nemo = nemo_defaults(card.config_class)
    stated = {
        "num_layers": card.layers,
        "hidden_size": card.hidden,
        "ffn_hidden_size": card.ffn_hidden,
        "num_attention_heads": card.heads,
        "num_query_groups": card.kv_heads,
        "share_embeddings_and_output_weights": card.tied_embeddings,
        "layernorm_epsilon": card.norm_epsilon,
        "init_method_std": card.init_std,
        "seq_length": card.native_context,
        "rotary_base": card.native_rope.base,
        "scale_factor": card.native_rope.factor,
        "low_freq_factor": card.native_rope.low_freq_factor,
        "high_freq_factor": card.native_rope.high_freq_factor,
        "old_context_len": card.native_rope.original_length,
    }
    assert stated == {name: nemo[name] for name in stated}
    assert card.head_dim == (nemo["kv_channels"] or card.hidden // card.heads)


@pytest.mark.parametrize("name", [name for name in FACTORIES if not name.startswith("tiny")])
def test_a_recipe_departs_from_nemo_only_where_it_means_to(name):
    (card,) = (card for card in PUBLISHED if name.startswith(card.name))
    ours = fdl.ordered_arguments(FACTORIES[name]().model.config, include_defaults=True)
    nemo = nemo_defaults(card.config_class)
    departed = {
        field
        for field, default in nemo.items()
        if default is not dataclasses.MISSING and ours.get(field) != default
    }
    assert departed <= MEANT.keys()


@pytest.mark.parametrize(
    ("card", "parameters"),
    [(LLAMA31_8B, 8_030_261_248), (LLAMA32_1B, 1_235_814_400)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_card_has_the_parameters_of_the_published_weights(card, parameters):
    embedding = 0 if card.tied_embeddings else card.vocab * card.hidden
    norms = (2 * card.layers + 1) * card.hidden
    assert card.matmul_parameters + embedding + norms == parameters


@pytest.mark.usefixtures("megatron_rank")
def test_matmul_parameters_are_those_of_the_model_that_is_built():
    config = fdl.build(FACTORIES["tiny_512"]().model.config)
    model = config.configure_model(tokenizer=None)
    matrices = [p.numel() for p in model.parameters() if p.dim() == 2]  # the head is the embedding
    vectors = [p.numel() for p in model.parameters() if p.dim() == 1]
    assert sum(matrices) == TINY.matmul_parameters
    assert sum(vectors) == (2 * TINY.layers + 1) * TINY.hidden


def test_flops_per_token_are_the_sum_by_hand():
    # 4 layers of attention 128 * 32 * (4 + 2 + 2 + 4) and MLP 3 * 128 * 384, and a head of
    # 128 * 512, are 13 * 2^16 weights; causal attention of 512 tokens is 4 * 128 * 512 = 2^18.
    assert TINY.flops_per_token(512) == 6 * (13 * 2**16 + 2**18)
