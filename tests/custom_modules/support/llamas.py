# SPDX-License-Identifier: Apache-2.0
"""A small Llama three times: as one set of weights, as ours on any rank, as Hugging Face's."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.gpt.model import LongContextGPT
from custom_modules.rope.config import RopeScaling
from tests.custom_modules.support.zigzag import here

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, EPS = 2, 32, 48, 8, 4, 4, 64, 1e-5
Weights = dict[str, Tensor]


def made_up_weights() -> Weights:
    """Return float64 weights under Hugging Face's names, so large that attention is not uniform."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return here(drawn * 2 / shape[-1] ** 0.5)

    weights = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN),
        "model.norm.weight": 1 + normal(HIDDEN),
        "lm_head.weight": normal(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": 1 + normal(HIDDEN),
            f"{at}.self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM),
            f"{at}.post_attention_layernorm.weight": 1 + normal(HIDDEN),
            f"{at}.mlp.gate_proj.weight": normal(FFN, HIDDEN),
            f"{at}.mlp.up_proj.weight": normal(FFN, HIDDEN),
            f"{at}.mlp.down_proj.weight": normal(HIDDEN, FFN),
        }
    return weights


def megatron_weights(weights: Weights, rank: int = 0, size: int = 1) -> Weights:
    """Return the part of tensor rank `rank` under Megatron's names, in its order.

    Megatron keeps query heads beside the KV head they share, and the gate beside the projection
    it multiplies.
    """
    named = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
        "output_layer.weight": weights["lm_head.weight"],
    }
    for layer in range(LAYERS):
        of = {
            name.split(f"layers.{layer}.")[1].removesuffix(".weight"): weight
            for name, weight in weights.items()
            if f"layers.{layer}." in name
        }
        q, k, v = (of[f"self_attn.{name}_proj"].chunk(KV_HEADS) for name in "qkv")
        groups = [torch.cat(group) for group in zip(q, k, v, strict=True)]
        at = f"decoder.layers.{layer}"
        named |= {
            f"{at}.input_layernorm.weight": of["input_layernorm"],
            f"{at}.self_attention.linear_qkv.weight": torch.cat(groups),
            f"{at}.self_attention.linear_proj.weight": of["self_attn.o_proj"],
            f"{at}.pre_mlp_layernorm.weight": of["post_attention_layernorm"],
            f"{at}.mlp.linear_fc1.weight": torch.cat((of["mlp.gate_proj"], of["mlp.up_proj"])),
            f"{at}.mlp.linear_fc2.weight": of["mlp.down_proj"],
        }
    return {name: tensor_parallel_part(name, t, rank, size) for name, t in named.items()}


def with_norms_and_bias(weights: Weights) -> Weights:
    """Add to weights under Megatron's names those of q and k norms and of a QKV bias."""
    generator = torch.Generator().manual_seed(6)
    added = {}
    for layer in range(LAYERS):
        at = f"decoder.layers.{layer}.self_attention"
        for name, size in {
            "q_layernorm.weight": HEAD_DIM,
            "k_layernorm.weight": HEAD_DIM,
            "linear_qkv.bias": (HEADS + 2 * KV_HEADS) * HEAD_DIM,
        }.items():
            drawn = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
            added[f"{at}.{name}"] = here(drawn)
    return weights | added


def tensor_parallel_part(name: str, whole: Tensor, rank: int, size: int) -> Tensor:
    """Return the part that tensor rank `rank` of `size` has of a tensor under Megatron's name."""
    if "linear_fc1" in name:
        return torch.cat([part.chunk(size)[rank] for part in whole.chunk(2)])
    if "linear_proj" in name or "linear_fc2" in name:
        return whole.chunk(size, dim=1)[rank]
    if "linear_qkv" in name or "word_embeddings" in name or "output_layer" in name:
        return whole.chunk(size)[rank]
    return whole


def configuration(dtype: torch.dtype, **other: Any) -> TransformerConfig:
    """Return the model's configuration in Megatron's groups as they are now."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    fields: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": FFN,
        "num_attention_heads": HEADS,
        "num_query_groups": KV_HEADS,
        "kv_channels": HEAD_DIM,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "normalization": "RMSNorm",
        "layernorm_epsilon": EPS,
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**(fields | other))


def ours(
    rope: RopeScaling,
    weights: Weights,
    dtype: torch.dtype,
    *,
    cp: ContextParallelKind | None = None,
    memory: Mapping[str, Any] | None = None,
    tied: bool = False,
    pre_process: bool = True,
    post_process: bool = True,
    **config: Any,
) -> LongContextGPT:
    """Return this rank's part of the model with weights under Megatron's names.

    `memory` holds the model's recompute, tiling and offload where they are not its defaults.
    """
    model_parallel_cuda_manual_seed(1)
    model = LongContextGPT(
        configuration(dtype, **config),
        rope=rope,
        vocab_size=VOCAB,
        max_sequence_length=64,
        cp=cp,
        ranks_per_node=8,
        share_embeddings_and_output_weights=tied,
        pre_process=pre_process,
        post_process=post_process,
        **(memory or {}),
    )
    load(model, weights)
    return model


def load(model: torch.nn.Module, weights: Weights) -> None:
    """Set every parameter to this tensor rank's part of its weight."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensor_parallel_part(name, weights[name], rank, size))


def hugging_face(rope: RopeScaling, weights: Weights, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return transformers' model of the same weights and rotation."""
    scaling = None
    if rope.method != "default":
        scaling = {
            "rope_type": rope.method,
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_length,
        }
    if rope.method == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        rms_norm_eps=EPS,
        rope_theta=rope.base,
        rope_scaling=scaling,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).to(dtype)
    model.load_state_dict(weights)
    return model


def of_stage(weights: Weights, stage: int, stages: int, *, tied: bool = False) -> Weights:
    """Return the weights of a pipeline stage, under the names and in the order that it has.

    If embedding and LM head are tied, the last of several stages has a copy of the embedding.
    """
    embedding, head = "embedding.word_embeddings.weight", "output_layer.weight"
    own = {}
    for name, weight in weights.items():
        if name.startswith(at := "decoder.layers."):
            layer, _, rest = name.removeprefix(at).partition(".")
            place, local = divmod(int(layer), LAYERS // stages)
            own |= {f"{at}{local}.{rest}": weight} if place == stage else {}
        elif (stage == 0) if name == embedding else (stage == stages - 1):
            own[name] = weight
    if tied and head in own:
        own[head] = weights[embedding]
        if stages == 1:
            del own[head]
    return own
