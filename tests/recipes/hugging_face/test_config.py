# SPDX-License-Identifier: Apache-2.0
"""config.json becomes a card, or is refused by the name of what is not known."""

import json
from dataclasses import replace

import pytest

from custom_modules.rope.config import RopeScaling
from recipes.hugging_face.config import card_of, exported_config, read_config, require_same
from recipes.models import CARDS, LLAMA31_8B, LLAMA32_1B

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "attention_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""As published with Llama-3.1-8B."""
QWEN2 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rope_scaling": None,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 32768,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""As published with Qwen3-30B-A3B-Base."""
MISTRAL = QWEN2 | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
NEMOTRON = LLAMA | {
    "architectures": ["NemotronForCausalLM"],
    "model_type": "nemotron",
    "hidden_act": "relu2",
    "norm_eps": 1e-5,
}


def _without(config: dict, key: str) -> dict:
    return {name: value for name, value in config.items() if name != key}


@pytest.mark.parametrize(("name", "config"), [("llama31_8b", LLAMA), ("qwen3_30b_a3b", QWEN3_MOE)])
def test_the_published_config_makes_the_shipped_card(name, config):
    require_same(CARDS[name], card_of(config, "published"), "it")


def test_a_card_names_each_fact_in_which_a_model_differs():
    other = replace(card_of(LLAMA, "published"), kv_heads=4)
    with pytest.raises(ValueError, match="; tied_embeddings is False where") as told:
        require_same(LLAMA32_1B, other, "the model of x")
    assert "kv_heads is 4 where llama32_1b has 8" in str(told.value)
    assert "'factor': 8.0" in str(told.value)  # of the rotation


def test_a_rotation_apart_from_the_cards_is_told():
    older = {**LLAMA, "rope_scaling": None, "max_position_embeddings": 8192}
    with pytest.raises(ValueError, match="native_context is 8192 where llama31_8b has 131072"):
        require_same(LLAMA31_8B, card_of(older, "published"), "it")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LLAMA | {"rope_scaling": {"rope_type": "spiral", "factor": 8.0}}, "spiral"),
        (LLAMA | {"model_type": "gemma2"}, "model_type 'gemma2'"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (LLAMA | {"attention_bias": True}, "attention_bias True"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias True"),
        (LLAMA | {"quantization_config": {"quant_method": "fp8"}}, "dequantize it"),
        (LLAMA | {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        (_without(LLAMA, "hidden_size"), "no hidden_size"),
        (_without(LLAMA, "rms_norm_eps"), "no rms_norm_eps"),
        (QWEN2 | {"use_sliding_window": True}, "sliding window in use"),
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (MISTRAL, "sliding_window 131072"),
        (_without(MISTRAL, "sliding_window"), "sliding_window 4096"),
        (NEMOTRON, "rope_scaling llama3, which NemotronForCausalLM"),
        (QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "no head_dim"),
        (QWEN3_MOE | {"norm_topk_prob": False}, "norm_topk_prob False; the Qwen3MoeForCausalLM"),
        (_without(QWEN3_MOE, "norm_topk_prob"), "norm_topk_prob False, being unstated"),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, r"mlp_only_layers \[0\]"),
        (_without(QWEN3_MOE, "moe_intermediate_size"), "no moe_intermediate_size"),
        (QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 4096}, "window in use"),
    ],
)
def test_what_is_not_known_is_refused_by_name(config, said):
    with pytest.raises(ValueError, match=said):
        card_of(config, "published")


def test_a_window_that_is_switched_off_is_none():
    assert card_of(QWEN2, "published").family == "qwen2"


def test_a_folder_without_config_is_no_model(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="no JSON object"):
        read_config(tmp_path)


@pytest.mark.parametrize("base", [LLAMA, None], ids=["imported", "from scratch"])
def test_an_exported_config_is_the_card_at_the_new_length(base):
    card = card_of(LLAMA, "published")
    rope = RopeScaling.yarn(base=500_000, factor=8.0, original_length=131_072)
    config = json.loads(json.dumps(exported_config(base, card, rope, 1_048_576, "bfloat16")))
    assert config["max_position_embeddings"] == 1_048_576
    assert config["original_max_position_embeddings"] == 131_072
    assert config["rope_scaling"]["rope_type"] == "yarn"
    assert config["rope_theta"] == 500_000
    assert config["torch_dtype"] == "bfloat16"
    again = card_of(config, "exported")
    require_same(replace(card, native_context=1_048_576, native_rope=rope), again, "it")
    if base is not None:
        assert config["eos_token_id"] == base["eos_token_id"]


def test_a_nemotron_is_not_exported_with_a_stretch_that_transformers_passes_over():
    card = card_of(NEMOTRON | {"rope_scaling": None}, "published")
    rope = replace(
        RopeScaling.yarn(base=500_000, factor=8.0, original_length=8192),
        partial_rotary_factor=0.5,
    )
    with pytest.raises(ValueError, match="ignores"):
        exported_config(None, card, rope, 65_536, "bfloat16")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads 0; it is a whole number, at least 1"),
        ({"num_hidden_layers": -2}, "num_hidden_layers -2"),
        ({"vocab_size": "512"}, "vocab_size '512'"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps inf; it is a number above 0"),
        ({"architectures": 5}, "architectures 5; it is a list of words"),
        ({"layer_types": 5}, "layer_types 5"),
        ({"rope_scaling": True}, "rope_scaling True; it is an object"),
        ({"longhaul_rope": 5}, "longhaul_rope 5"),
        ({"partial_rotary_factor": 0.5}, "transformers rotates whole heads"),
        (
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "factor": 2.0,
                    "short_factor": [1.0],
                    "long_factor": [2.0],
                }
            },
            "1 numbers in short_factor, and 64 pairs of dimensions",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_value_of_another_kind_is_one_sentence(change, words):
    with pytest.raises(ValueError, match=words):
        card_of(LLAMA | change, "published")


@pytest.mark.parametrize("part", [0.5, 1.0])
def test_a_nemotron_keeps_the_part_of_its_heads_that_turns(part):
    card = card_of(NEMOTRON | {"rope_scaling": None, "partial_rotary_factor": part}, "nemotron")
    assert card.native_rope.partial_rotary_factor == part
    config = exported_config(None, card, card.native_rope, 262_144, "bfloat16")
    again = card_of(json.loads(json.dumps(config)), "again")
    assert again.native_rope.partial_rotary_factor == part


def test_other_fields_that_limit_the_length_do_not_outlive_it():
    base = LLAMA | {"max_sequence_length": 64, "n_positions": 64, "seq_length": 64}
    config = exported_config(base, LLAMA31_8B, LLAMA31_8B.native_rope, 262_144, "bfloat16")
    assert config["max_position_embeddings"] == 262_144
    assert not {"max_sequence_length", "n_positions", "seq_length"} & config.keys()


def test_the_context_of_a_linear_stretch_is_what_it_reaches():
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert card_of(LLAMA | scaling | {"max_position_embeddings": 4096}, "x").native_context == 16384
