# SPDX-License-Identifier: Apache-2.0
"""Layers that differ, from config.json to a card and back."""

import json
from dataclasses import replace

import pytest

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.layers import LayerPattern
from recipes.hugging_face.config import card_of, exported_config, require_same
from recipes.models import CARDS

SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
"""As published with SmolLM3-3B-Base, whose embedding is tied by default."""
LOCAL, FULL = "sliding_attention", "full_attention"
OLMO3 = {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": [LOCAL, LOCAL, LOCAL, FULL] * 8,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 100278,
}
"""As published with Olmo-3-1025-7B."""
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
"""As published with gemma-3-1b-pt."""
BY_KIND = {
    FULL: {"rope_theta": 1000000, "rope_type": "default"},
    LOCAL: {"rope_theta": 10000, "rope_type": "default"},
}
"""The rotations of Gemma 3 in the form of transformers 5."""
PUBLISHED = {"smollm3_3b": SMOLLM3, "olmo3_7b": OLMO3, "gemma3_1b": GEMMA3}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_that_of_the_shipped_card(name):
    require_same(CARDS[name], card_of(PUBLISHED[name], name), "the published model")


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("based", [True, False])
def test_an_export_states_the_layers_and_is_read_as_the_same_card(name, based):
    card = card_of(PUBLISHED[name], name)
    base = PUBLISHED[name] if based else None
    rope = RopeScaling.yarn(base=card.native_rope.base, factor=16.0, original_length=8192)
    written = json.loads(json.dumps(exported_config(base, card, rope, 131_072, "bfloat16")))
    again = card_of(written, name)
    assert again.pattern == card.pattern
    assert again.native_rope == rope
    assert replace(again, native_rope=card.native_rope, native_context=card.native_context) == card


def test_the_form_of_transformers_5_is_read_and_written_by_kind_of_layer():
    card = card_of(GEMMA3, "gemma3_1b")
    rope = RopeScaling.linear(base=1_000_000, factor=8.0, original_length=32_768)
    written = exported_config(GEMMA3, card, rope, 262_144, "bfloat16")
    assert written["rope_parameters"][LOCAL] == {"rope_type": "default", "rope_theta": 10_000.0}
    assert written["rope_parameters"][FULL]["factor"] == 8.0
    new = {key: value for key, value in written.items()
           if key not in ("rope_scaling", "rope_theta", "rope_local_base_freq")}  # fmt: skip
    assert card_of(new, "gemma3_1b") == card_of(written, "gemma3_1b")
    other = {**new["rope_parameters"], LOCAL: {"rope_type": "default", "rope_theta": 20_000.0}}
    found = card_of(new | {"rope_parameters": other}, "gemma3_1b").pattern
    assert found == LayerPattern(every=6, window=512, local_rope=RopeScaling.base_change(20_000))


def test_a_model_whose_layers_are_alike_has_no_pattern():
    alike = {"no_rope_layers": [1] * 36}
    assert card_of(SMOLLM3 | alike, "it").pattern is None
    assert card_of(OLMO3 | {"layer_types": [FULL] * 32}, "it").pattern is None


def test_olmo3_without_kinds_has_full_attention_at_every_4th_layer_as_in_transformers():
    from transformers import AutoConfig

    unstated = {key: value for key, value in OLMO3.items() if key != "layer_types"}
    config = unstated | {"sliding_window_pattern": 2}
    pattern = card_of(config, "it").pattern
    kinds = AutoConfig.for_model(**config).layer_types
    assert [pattern.is_full(at) for at in range(1, 33)] == [kind == FULL for kind in kinds]


@pytest.mark.parametrize(
    ("config", "changed", "said"),
    [
        (OLMO3, {"layer_types": [LOCAL] * 31 + [FULL, LOCAL]}, "33 entries in layer_types and 32"),
        (OLMO3, {"layer_types": [LOCAL, FULL, FULL, LOCAL] * 8}, "layer_types without a period: "
         "full_attention is at layer 2 first, and by that layer 3 would differ"),
        (OLMO3, {"layer_types": [LOCAL] * 32}, "layer_types with no full_attention"),
        (OLMO3, {"sliding_window": None}, "sliding_window null and layers of sliding_attention"),
        (OLMO3, {"rope_parameters": {FULL: {"rope_theta": 500000, **OLMO3["rope_scaling"]},
         LOCAL: {"rope_theta": 10000, "rope_type": "default"}}}, "rope_theta 500000 and in rope_p"),
        (GEMMA3, {"rope_parameters": {FULL: {"rope_theta": 1000000, "rope_type": "default"},
         LOCAL: {"rope_theta": 20000, "rope_type": "default"}}}, "rope_local_base_freq 10000 and"),
        (SMOLLM3, {"no_rope_layers": [0] * 36}, "no_rope_layers with every layer 0"),
        (SMOLLM3, {"no_rope_layers": None, "no_rope_layer_interval": 1}, "no layer would rotate"),
        (OLMO3, {"layer_types": ["chunked_attention", FULL] * 16}, "chunked_attention in layer_ty"),
        (OLMO3, {"sliding_window": 0}, "sliding_window 0; it is a whole number, at least 1"),
        (SMOLLM3, {"no_rope_layers": [1, 0, 0, 1] * 9}, "no_rope_layers without a period: 0 is"),
        (SMOLLM3, {"no_rope_layers": "every 4th"}, "no_rope_layers 'every 4th'; it is a list"),
        (SMOLLM3, {"use_sliding_window": True}, "use_sliding_window true; the SmolLM3 trained"),
        (GEMMA3, {"query_pre_attn_scalar": 168}, "query_pre_attn_scalar 168 and head_dim 256"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        (GEMMA3, {"sliding_window_pattern": 27}, "26 layers, and full attention in every 27th"),
        (SMOLLM3, {"layer_types": [FULL, FULL, FULL, LOCAL] * 9, "sliding_window": 4096,
         "use_sliding_window": None}, "sliding_attention in layer_types; the SmolLM3 trained here"),
        (GEMMA3, {"rope_local_base_freq": [1], "rope_parameters": BY_KIND},
         r"rope_local_base_freq \[1\]; it is a number above 0"),
        (GEMMA3, {"rope_local_base_freq": "10k", "rope_parameters": BY_KIND},
         "rope_local_base_freq '10k'; it is a number above 0"),
        (GEMMA3, {"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        (OLMO3, {"rope_parameters": {FULL: {"rope_theta": 500000, **OLMO3["rope_scaling"]},
         LOCAL: None}}, "null for sliding_attention in rope_parameters, which is no rotation"),
        (GEMMA3, {"rope_parameters": {FULL: {"rope_theta": 1000000, "rope_type": "default"},
         LOCAL: None}}, "null for sliding_attention in rope_parameters, which is no rotation"),
        (GEMMA3, {"rope_parameters": BY_KIND | {FULL: None}},
         "null for full_attention in rope_parameters, which is no rotation; these layers of"),
        (OLMO3, {"rope_parameters": {FULL: {"rope_theta": 500000, **OLMO3["rope_scaling"]}}},
         "nothing for sliding_attention in rope_parameters; these layers of olmo3 rotate"),
        (GEMMA3, {"rope_parameters": {LOCAL: BY_KIND[LOCAL]}}, "nothing for full_attention in"),
        (OLMO3, {"rope_scaling": None,
         "rope_parameters": BY_KIND | {LOCAL: {"rope_theta": 500000}}}, "rope_theta 500000 and in "
         "rope_parameters 1000000; they must be equal"),
        (SMOLLM3, {"rope_parameters": {FULL: None}}, r"has full_attention \(no rotation\); every"),
    ],
)  # fmt: skip
def test_layers_that_are_not_known_are_refused_by_name(config, changed, said):
    with pytest.raises(ValueError, match=said):
        card_of(config | changed, "it")


@pytest.mark.parametrize(("layers", "entries"), [(36, 40), (12, 36), (8, 36)])
def test_the_first_entries_of_a_longer_list_are_read_as_transformers_does(layers, entries):
    changed = {"num_hidden_layers": layers, "no_rope_layers": ([1, 1, 1, 0] * 10)[:entries]}
    assert card_of(SMOLLM3 | changed, "it").pattern == LayerPattern(every=4, full_rotates=False)
    with pytest.raises(ValueError, match=f"{layers - 1} entries in no_rope_layers and {layers}"):
        card_of(SMOLLM3 | changed | {"no_rope_layers": [1] * (layers - 1)}, "it")


@pytest.mark.parametrize("config", [OLMO3, GEMMA3])
def test_an_export_of_layers_that_are_alike_has_the_form_of_transformers_5_too(config):
    alike = card_of(config | {"layer_types": [FULL] * config["num_hidden_layers"]}, "it")
    rope = RopeScaling.yarn(base=alike.native_rope.base, factor=16.0, original_length=8192)
    written = exported_config(None, alike, rope, 131_072, "bfloat16")
    assert written["rope_parameters"].keys() == {FULL}
    assert card_of(json.loads(json.dumps(written)), "it").native_rope == rope


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("olmo3_7b", {"window": None}, "layers of olmo3 have a window and a local_rope"),
        ("gemma3_1b", {"local_rope": None}, "layers of gemma3 have a window and a local_rope"),
        ("smollm3_3b", {"window": 512}, "layers of smollm3 have no window and no rotation"),
    ],
)
def test_a_pattern_that_a_family_does_not_have_is_refused(name, changed, said):
    card = CARDS[name]
    with pytest.raises(ValueError, match=said):
        replace(card, pattern=replace(card.pattern, **changed))


def test_an_export_that_one_version_of_transformers_would_rotate_otherwise_is_refused():
    card = card_of(OLMO3, "olmo3_7b")
    rope = RopeScaling.base_change(8_000_000)
    with pytest.raises(ValueError, match="full layers is 8,000,000 and that of local layers 500,0"):
        exported_config(OLMO3, card, rope, 131_072, "bfloat16")
