# SPDX-License-Identifier: Apache-2.0
"""A field of config.json that nothing here reads is without effect, told, or refused by name."""

import json

import pytest
import torch
import transformers

from recipes.hugging_face.config import card_of
from recipes.hugging_face.positions import rotation_of
from recipes.hugging_face.unread_fields import OF_POSITIONS, WITHOUT_EFFECT, Fields
from tests.recipes.hugging_face.support.models import CONFIGS
from tests.recipes.hugging_face.test_positions import LLAMA


def published(name: str) -> dict:
    """Return config.json as transformers writes it of a family, with all of its defaults."""
    config = CONFIGS[name]
    kind = "Gemma3" if name == "gemma3" else type(config).__name__.removesuffix("Config")
    return json.loads(json.dumps(config.to_dict() | {"architectures": [f"{kind}ForCausalLM"]}))


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_writes_of_a_family_is_read_or_without_effect(name):
    assert card_of(published(name), name).notes == []


COMPUTED = {
    "dual_chunk_attention_config": {"chunk_size": 262_144, "local_size": 8192},
    "sparse_config": {"kernel_size": 32, "block_size": 64},  # MiniCPM 4
    "sparse_attention_config": {"block": 64},
    "use_logn_attn": True,  # Qwen 1
    "use_dynamic_ntk": True,
    "alibi": True,  # PaddleNLP
    "attn_logit_softcapping": 50.0,  # Gemma 2
    "residual_multiplier": 0.22,  # Granite
    "logits_scaling": 16.0,
    "logit_scale": 0.0625,  # Cohere
    "scale_emb": 12,  # MiniCPM
    "attention_chunk_size": 8192,  # Llama 4
    "attn_temperature_tuning": True,
    "rope_interleaved": True,
    "clip_qkv": 8.0,  # OLMo
    "num_local_experts": 8,
    "use_qk_norm": True,  # Hunyuan, adds weights; refused by tensors elsewhere
}


@pytest.mark.parametrize(("key", "value"), COMPUTED.items(), ids=COMPUTED)
def test_a_field_that_changes_the_computation_is_refused_by_its_name(key, value):
    with pytest.raises(ValueError, match=f"has {key} .*; it is not computed here, so remove the"):
        card_of(LLAMA | {key: value}, "published")


@pytest.mark.parametrize("key", OF_POSITIONS)
def test_positions_that_are_not_the_rotation_s_are_refused_for_every_family(key):
    with pytest.raises(ValueError, match=f"has {key} .*which changes positions or attention"):
        rotation_of(LLAMA | {"model_type": "deepseek_v3", key: {"chunk_size": 8}})
    assert rotation_of(LLAMA | {key: None}) == rotation_of(LLAMA | {key: False})


@pytest.mark.parametrize(
    "fields",
    [
        {"alibi": False, "rope_scaling_factor": 1.0, "rope_scaling_type": None},
        {"use_flash_attention": True, "fuse_attention_qkv": True, "_attn_implementation": "sdpa"},
        {"attn_logit_softcapping": None, "residual_multiplier": 1.0, "num_local_experts": 0},
        {"attention_dropout": 0.1, "attention_probs_dropout_prob": 0.1},
    ],
    ids=["switched off", "kernels", "unset", "of training"],
)
def test_a_field_that_is_switched_off_or_is_a_kernel_s_is_taken_without_a_word(fields):
    assert card_of(LLAMA | fields, "published").notes == []


HEAD_DIM = card_of(LLAMA, "published").head_dim


@pytest.mark.parametrize(
    ("key", "same", "other"),
    [
        ("rotary_dim", HEAD_DIM, 2),
        ("rotary_base", 10_000, 500_000),
        ("rotary_percent", 1.0, 0.5),
        ("position_embedding_type", "RoPE", "alibi"),
        ("pe_type", "rotary", "alibi"),
        ("rope_type", "default", "longrope"),
        ("attn_type", "full", "sparse"),
        ("is_causal", True, "prefix"),
        ("norm_type", "rmsnorm", "layernorm"),
        ("attention_head_dim", HEAD_DIM, 512),
        ("use_qk_norm", False, True),
    ],
)
def test_a_field_that_says_what_is_computed_anyway_is_taken(key, same, other):
    assert card_of(LLAMA | {key: same}, "published").notes == []
    with pytest.raises(ValueError, match=f"has {key} {other}"):
        card_of(LLAMA | {key: other}, "published")


def test_another_field_that_nothing_reads_is_told():
    card = card_of(LLAMA | {"unsloth_fixed": True, "time_steps": 12}, "published")
    assert card.notes == ["its config.json has unsloth_fixed, time_steps, which nothing here reads"]


def test_a_field_counts_as_read_only_where_it_is_read():
    fields = Fields({"a": 1, "b": 2, "c": 3})
    assert (fields["a"], fields.get("b")) == (1, 2)
    assert fields.names == {"a", "b"}


WORDS = {
    "architectures", "model_type", "dtype", "torch_dtype", "name_or_path", "tokenizer_class",
    "transformers_version", "torchscript", "use_bfloat16", "intermediate_size", "problem_type",
    "id2label", "label2id", "task_specific_params", "finetuning_task",
}  # fmt: skip
"""Fields of the list that are words of a model, or that other families need."""


def test_a_field_that_is_listed_as_without_effect_changes_no_number():
    config = CONFIGS["llama"].to_dict()
    tokens = torch.arange(40)[None]
    model = transformers.LlamaForCausalLM(CONFIGS["llama"]).eval()
    changed = dict.fromkeys(WITHOUT_EFFECT - WORDS, 2)
    changed |= {"early_stopping": True, "return_dict": True}
    other = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(config | changed))
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(other.eval()(tokens)[0], model(tokens)[0], rtol=0, atol=1e-5)
