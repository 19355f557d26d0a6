# SPDX-License-Identifier: Apache-2.0
"""Small models of each family as Hugging Face folders, with made-up weights and a tokenizer."""

import json
from pathlib import Path

import torch
import transformers

VOCAB = 512
CONTEXT = 64
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
}
WINDOWS = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "llama, tied": transformers.LlamaConfig(**SHAPE | {"tie_word_embeddings": True}),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen2, tied": transformers.Qwen2Config(**SHAPE | {"tie_word_embeddings": True}),
    "qwen3": transformers.Qwen3Config(**SHAPE),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=None),
    "mixtral": transformers.MixtralConfig(
        **SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SHAPE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        norm_topk_prob=True,
    ),
    "nemotron": transformers.NemotronConfig(**SHAPE, partial_rotary_factor=0.5),
    "smollm3": transformers.SmolLM3Config(**SHAPE, no_rope_layers=[1, 0]),
    "olmo3": transformers.Olmo3Config(**SHAPE, **WINDOWS),
    "gemma3": transformers.Gemma3TextConfig(
        **SHAPE | {"tie_word_embeddings": True},
        **WINDOWS,
        query_pre_attn_scalar=16,
        rope_local_base_freq=500.0,
    ),
}


def folder(
    to: Path,
    name: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **fields: object,
) -> Path:
    """Write a model whose attention and norms are not uniform; `fields` replace its config's."""
    config = type(CONFIGS[name]).from_dict({**CONFIGS[name].to_dict(), **fields})
    model = transformers.AutoModelForCausalLM.from_config(config)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            made = torch.randn(parameter.shape, generator=draw)
            if parameter.ndim == 2:
                parameter.copy_(made / parameter.shape[1] ** 0.5)
            else:
                parameter.add_(made * 0.2)
    model.to(dtype).save_pretrained(to, max_shard_size=max_shard_size)
    write_tokenizer(to)
    return to


def write_tokenizer(to: Path) -> None:
    """Write a byte-level tokenizer that says it takes texts of the native context."""
    from data.tokenization.tokenizer import train

    train(["a tokenizer of bytes, with a merge or two: the the the"], 260).save(to)
    file = to / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": CONTEXT}))
