# SPDX-License-Identifier: Apache-2.0
"""Every card against NeMo's config class, transformers' defaults and the published totals.

A card follows the model as it was published. Where NeMo's class or transformers' default is of
another model, or wrong, the field stands below with what they say and the reason.
"""

import dataclasses
import importlib
import json
from typing import Any

import pytest
import torch
import transformers

from recipes.hugging_face.config import card_of, exported_config, require_same
from recipes.models import CARDS, TINY
from recipes.spec.model_card import ModelCard

PUBLISHED = [card for card in CARDS.values() if card is not TINY]  # tiny is ours alone
EACH = pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
IN_NEMO = [card for card in PUBLISHED if card.config_class is not None]
EACH_IN_NEMO = pytest.mark.parametrize("card", IN_NEMO, ids=lambda card: card.name)

Apart = tuple[tuple[str, dict[str, Any], str], ...]
"""A field, what others say of it by card, and why the card says something else."""

NEMO: Apart = (
    (
        "init_method_std",
        {"llama3_8b": 0.01, "llama3_70b": 0.008944},
        "for training from scratch; config.json says 0.02",
    ),
    (
        "share_embeddings_and_output_weights",
        {"qwen25_0p5b": False, "qwen25_1p5b": False},
        "config.json says true, and the weights have no LM head",
    ),
    (
        "seq_length",
        dict.fromkeys(
            ["qwen25_1p5b", "qwen25_7b", "qwen25_14b", "qwen25_32b", "qwen25_72b"], 131_072
        ),
        "config.json says it; trained on 32,768",
    ),
    (
        "seq_length",
        dict.fromkeys(
            [
                "qwen25_3b",
                *(card.name for card in PUBLISHED if card.family.startswith("qwen3")),
                "mistral_nemo_12b",
                "mixtral_8x7b",
                "mixtral_8x22b",
            ],
            4096,
        ),
        "the length of NeMo's pretraining recipes; trained and published with more",
    ),
    ("rotary_base", {"mistral_7b": 10_000}, "version 0.1's"),
    ("window_size", {"mistral_7b": [4096, 0]}, "version 0.1's; from 0.2 on there is none"),
    (
        "ffn_hidden_size",
        {"qwen3_30b_a3b": 6144},
        "of layers without experts, of which the model has none",
    ),
)
TRANSFORMERS: dict[str, tuple[str, Apart]] = {
    "llama2_7b": (
        "LlamaConfig",
        (
            ("max_position_embeddings", {"llama2_7b": 2048}, "Llama 1's"),
            ("rms_norm_eps", {"llama2_7b": 1e-6}, "Llama 1's"),
        ),
    ),
    "mistral_7b": (
        "MistralConfig",
        (
            ("max_position_embeddings", {"mistral_7b": 131_072}, "version 0.1 has a window"),
            ("rope_theta", {"mistral_7b": 10_000.0}, "version 0.1's"),
            ("vocab_size", {"mistral_7b": 32_000}, "version 0.1's"),
            ("rms_norm_eps", {"mistral_7b": 1e-6}, "of no published model"),
            ("sliding_window", {"mistral_7b": 4096}, "version 0.1's"),
        ),
    ),
    "mixtral_8x7b": (
        "MixtralConfig",
        (("max_position_embeddings", {"mixtral_8x7b": 131_072}, "of no published model"),),
    ),
    "qwen3_30b_a3b": (
        "Qwen3MoeConfig",
        (
            ("num_hidden_layers", {"qwen3_30b_a3b": 24}, "Qwen3-15B-A2B's, never published"),
            ("rope_theta", {"qwen3_30b_a3b": 10_000.0}, "before the base was raised"),
            ("norm_topk_prob", {"qwen3_30b_a3b": False}, "published as true"),
        ),
    ),
    "nemotron4_15b": (
        "NemotronConfig",
        (("num_key_value_heads", {"nemotron4_15b": None}, "as many as heads; the paper has 8"),),
    ),
}
PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama31_8b": 8_030_261_248,
    "llama31_70b": 70_553_706_496,
    "llama31_405b": 405_853_388_800,
    "llama32_1b": 1_235_814_400,
    "llama32_3b": 3_212_749_824,
    "qwen25_0p5b": 494_032_768,
    "qwen25_1p5b": 1_543_714_304,
    "qwen25_3b": 3_085_938_688,
    "qwen25_7b": 7_615_616_512,
    "qwen25_14b": 14_770_033_664,
    "qwen25_32b": 32_763_876_352,
    "qwen25_72b": 72_706_203_648,
    "qwen3_0p6b": 596_049_920,
    "qwen3_1p7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "mistral_7b": 7_248_023_552,
    "mistral_nemo_12b": 12_247_782_400,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1p7b": 1_711_376_384,
    "smollm3_3b": 3_075_098_624,
    "smollm3_4k_3b": 3_075_098_624,
    "olmo3_7b": 7_298_011_136,
    "olmo3_8k_7b": 7_298_011_136,
    "olmo3_32b": 32_233_522_176,
    "olmo3_8k_32b": 32_233_522_176,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
}
"""Of the safetensors on Hugging Face."""


def nemo_defaults(dotted_name: str) -> dict[str, Any]:
    """Return the fields of NeMo's config class; building one may need Transformer Engine."""
    module, _, name = dotted_name.rpartition(".")
    owner = getattr(importlib.import_module(module), name)
    return {
        field.name: field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in dataclasses.fields(owner)
    }


def apart(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Return what they say of the fields in which they differ from mine."""
    return {name: theirs[name] for name, value in mine.items() if theirs[name] != value}


def listed(listing: Apart, card: ModelCard) -> dict[str, Any]:
    """Return what others are known to say otherwise of a card."""
    return {field: others[card.name] for field, others, _ in listing if card.name in others}


def in_nemos_words(card: ModelCard) -> dict[str, Any]:
    rope = card.native_rope
    words: dict[str, Any] = {
        "num_layers": card.layers,
        "hidden_size": card.hidden,
        "ffn_hidden_size": card.ffn_hidden,
        "num_attention_heads": card.heads,
        "num_query_groups": card.kv_heads,
        "kv_channels": card.head_dim,
        "share_embeddings_and_output_weights": card.tied_embeddings,
        "layernorm_epsilon": card.norm_epsilon,
        "init_method_std": card.init_std,
        "seq_length": card.native_context,
        "rotary_base": rope.base,
        "rotary_percent": rope.partial_rotary_factor,
        "window_size": None,
    }
    if rope.method == "llama3":
        words |= {
            "scale_factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "old_context_len": rope.original_length,
        }
    if card.experts:
        words |= {
            "num_moe_experts": card.experts,
            "moe_router_topk": card.experts_per_token,
            "moe_ffn_hidden_size": card.ffn_hidden,
        }
    return words


@EACH_IN_NEMO
def test_a_card_states_what_nemo_states(card):
    nemo = nemo_defaults(card.config_class)
    nemo["num_query_groups"] = nemo["num_query_groups"] or nemo["num_attention_heads"]
    nemo["kv_channels"] = nemo["kv_channels"] or nemo["hidden_size"] // nemo["num_attention_heads"]
    nemo["moe_ffn_hidden_size"] = nemo["moe_ffn_hidden_size"] or nemo["ffn_hidden_size"]
    assert apart(in_nemos_words(card), nemo) == listed(NEMO, card)
    assert nemo["vocab_size"] in (None, card.vocab)  # None: the tokenizer's
    assert ("scale_factor" in nemo) == (card.native_rope.method == "llama3")


def in_transformers_words(card: ModelCard) -> dict[str, Any]:
    rotation = card.native_rope
    return exported_config(None, card, rotation, card.native_context, "float32")


OUR_OWN = ("architectures", "torch_dtype", "dtype", "head_dim", "longhaul_rope", "rope_parameters")
"""Fields that are not the model's, left to be hidden / heads, or those of transformers 5."""


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_card_states_what_transformers_has_for_default(name):
    card, (config_class, listing) = CARDS[name], TRANSFORMERS[name]
    default = getattr(transformers, config_class)()
    mine = in_transformers_words(card)
    for field in OUR_OWN:
        mine.pop(field, None)
    theirs = {field: getattr(default, field, None) for field in mine}
    assert apart(mine, theirs) == listed(listing, card)


@EACH
def test_a_card_comes_back_from_its_config_json(card):
    config = json.loads(json.dumps(in_transformers_words(card)))
    require_same(card, card_of(config, "again"), "what comes back")


def test_a_native_context_is_the_cards_or_what_the_published_config_says():
    card = CARDS["qwen25_7b"]
    for length in (32_768, 131_072):
        config = in_transformers_words(card) | {"max_position_embeddings": length}
        require_same(card, card_of(config, "published"), "it")
    config = in_transformers_words(card) | {"max_position_embeddings": 65_536}
    with pytest.raises(ValueError, match="native_context is 65536 where qwen25_7b has 32768"):
        require_same(card, card_of(config, "other"), "it")


def test_a_model_whose_epsilon_came_through_fp32_is_the_card_s():
    card = CARDS["smollm2_135m"]
    through = float(torch.tensor(card.norm_epsilon, dtype=torch.float32))  # as GGUF stores it
    assert through != card.norm_epsilon
    require_same(card, card_of(in_transformers_words(card) | {"rms_norm_eps": through}, "it"), "it")
    config = in_transformers_words(card) | {"rms_norm_eps": 2 * through}
    with pytest.raises(ValueError, match=r"norm_epsilon is 1\.99.* where smollm2_135m has 1e-05"):
        require_same(card, card_of(config, "other"), "it")


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_card_has_the_parameters_of_the_published_weights(name):
    assert CARDS[name].parameters == PARAMETERS[name]


def test_every_card_whose_weights_are_published_is_counted():
    assert {card.name for card in PUBLISHED if card.hf_id is not None} == PARAMETERS.keys()


def test_nemotron_4_has_the_parameters_of_its_paper():
    card = CARDS["nemotron4_15b"]  # arXiv 2402.16819, section 2
    tables = 2 * card.vocab * card.hidden
    assert round(tables / 1e8) == pytest.approx(32, abs=1)
    assert round((card.parameters - tables) / 1e8) == 125


@EACH
def test_parameters_are_those_of_the_model_of_transformers(card):
    shrunken = dataclasses.replace(card, layers=card.pattern.every if card.pattern else 2)
    config = in_transformers_words(shrunken)
    theirs = getattr(transformers, card.facts.architecture)
    with torch.device("meta"):
        model = theirs(theirs.config_class.from_dict(config))
    model.tie_weights()
    assert model.num_parameters() == shrunken.parameters


def test_names_tell_cards_apart_where_one_begins_a_recipes():
    for name in CARDS:
        assert [other for other in CARDS if f"{name}_".startswith(f"{other}_")] == [name]


def test_flops_per_token_are_the_sum_by_hand():
    # 2 layers of attention 128 * 32 * (4 + 2 + 2 + 4) and MLP 3 * 128 * 384, and a head of
    # 128 * 512, are 7 * 2^16 weights; causal attention of 512 tokens is 2 * 128 * 512 = 2^17.
    assert TINY.flops_per_token(512) == 6 * (7 * 2**16 + 2**17)
