# SPDX-License-Identifier: Apache-2.0
"""A small model of each family twice: as Hugging Face's, made up, and as ours on any rank."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from megatron.core import parallel_state
from megatron.core.activations import fast_gelu, squared_relu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.gpt.block import Block
from custom_modules.gpt.model import LongContextGPT
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.layers import LayerPattern
from tests.custom_modules.support.llamas import configuration

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, EPS = 2, 32, 48, 8, 4, 8, 64, 1e-5
EXPERTS, BEST, BASE = 4, 2, 1000.0
Weights = dict[str, Tensor]

SHAPE = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "rms_norm_eps": EPS,
    "rope_theta": BASE,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
WINDOW, LOCAL_BASE, NATIVE = 9, 50.0, 12
LAYER_TYPES = ["sliding_attention", "full_attention"]
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": NATIVE,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
THEIRS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen3": transformers.Qwen3Config(**SHAPE),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=None),
    "mixtral": transformers.MixtralConfig(
        **SHAPE, num_local_experts=EXPERTS, num_experts_per_tok=BEST, sliding_window=None
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SHAPE,
        num_experts=EXPERTS,
        num_experts_per_tok=BEST,
        moe_intermediate_size=FFN,
        norm_topk_prob=True,
    ),
    "nemotron": transformers.NemotronConfig(**SHAPE, norm_eps=EPS, partial_rotary_factor=0.5),
    "smollm3": transformers.SmolLM3Config(**SHAPE, no_rope_layers=[1, 0]),
    "olmo3": transformers.Olmo3Config(
        **SHAPE, sliding_window=WINDOW, layer_types=LAYER_TYPES, rope_scaling=YARN
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **SHAPE,
        sliding_window=WINDOW,
        layer_types=LAYER_TYPES,
        query_pre_attn_scalar=HEAD_DIM,
        rope_local_base_freq=LOCAL_BASE,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    ),
}
OF_EXPERTS = {
    "num_moe_experts": EXPERTS,
    "moe_router_topk": BEST,
    "moe_ffn_hidden_size": FFN,
    "moe_token_dispatcher_type": "alltoall",
}
OURS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
    "mistral": {},
    "mixtral": OF_EXPERTS,
    "qwen3_moe": {"qk_layernorm": True, **OF_EXPERTS},
    "nemotron": {
        "normalization": "LayerNorm",
        "layernorm_zero_centered_gamma": True,
        "activation_func": squared_relu,
        "gated_linear_unit": False,
    },
    "smollm3": {},
    "olmo3": {},
    "gemma3": {
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "activation_func": fast_gelu,
    },
}
_LOCAL = {"every": 2, "window": WINDOW}
ROPES = {
    "olmo3": RopeScaling.yarn(base=BASE, factor=4.0, original_length=NATIVE),
    "gemma3": RopeScaling.linear(base=BASE, factor=4.0, original_length=NATIVE),
}
"""Of families that are not plain here."""
ARCHITECTURE: dict[str, dict[str, Any]] = {
    "smollm3": {"pattern": LayerPattern(every=2, full_rotates=False)},
    "olmo3": {
        "pattern": LayerPattern(local_rope=RopeScaling.base_change(BASE), **_LOCAL),
        "block": Block(pre_norm=False, post_norm=True, wide_qk_norm=True),
    },
    "gemma3": {
        "pattern": LayerPattern(local_rope=RopeScaling.base_change(LOCAL_BASE), **_LOCAL),
        "block": Block(post_norm=True, scaled_embedding=True),
    },
}
"""Arguments of the model by which a family differs."""
UNCHUNKED = ("olmo3",)
"""Families whose heads are normalised together, so that none is projected alone."""
ZERO_CENTERED = ("nemotron", "gemma3")
FAMILIES = tuple(THEIRS)
NAMES_OF_EXPERTS = {
    "block_sparse_moe": ("w1", "w2", "w3"),
    "mlp": ("gate_proj", "down_proj", "up_proj"),
}
"""Gate, down and up of Mixtral and of Qwen 3, by the name of the layer that has experts."""
WITH_EXPERTS = tuple(family for family, config in OURS.items() if "num_moe_experts" in config)


def hugging_face(family: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Return transformers' model with weights so large that attention is not uniform."""
    model = transformers.AutoModelForCausalLM.from_config(THEIRS[family]).to(dtype)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            made = torch.randn(parameter.shape, generator=draw, dtype=torch.float64, device="cpu")
            matrix = parameter.ndim == 2
            made *= 2 / parameter.shape[1] ** 0.5 if matrix else 0.3
            if "norm" in name and name.endswith("weight") and family not in ZERO_CENTERED:
                made += 1
            parameter.copy_(made)
    return model


def megatron_weights(theirs: Mapping[str, Tensor]) -> Weights:
    """Return weights, or their gradients, under Megatron's names and in its order.

    Megatron keeps the query heads of a KV head beside its key and value, and the gate before the
    projection it multiplies.
    """
    found = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "output_layer.weight": theirs["lm_head.weight"],
    } | _both(theirs, "model.norm", "decoder.final_layernorm")
    for layer in range(LAYERS):
        of, at = f"model.layers.{layer}", f"decoder.layers.{layer}"
        attention = {
            "o_proj": "linear_proj",
            "q_norm": "q_layernorm",
            "k_norm": "k_layernorm",
        }
        for name, megatrons in attention.items():
            found |= _both(theirs, f"{of}.self_attn.{name}", f"{at}.self_attention.{megatrons}")
        found |= _both(theirs, f"{of}.input_layernorm", f"{at}.input_layernorm")
        if f"{of}.post_feedforward_layernorm.weight" in theirs:  # norms after both
            after = {
                "pre_feedforward_layernorm": "pre_mlp_layernorm",
                "post_attention_layernorm": "self_attention.linear_proj.post_layernorm",
                "post_feedforward_layernorm": "mlp.linear_fc2.post_layernorm",
            }
        else:
            after = {"post_attention_layernorm": "pre_mlp_layernorm"}
        for name, megatrons in after.items():
            found |= _both(theirs, f"{of}.{name}", f"{at}.{megatrons}")
        for kind in ("weight", "bias"):
            heads = [theirs.get(f"{of}.self_attn.{name}_proj.{kind}") for name in "qkv"]
            if heads[0] is not None:
                groups = zip(*(part.chunk(KV_HEADS) for part in heads), strict=True)
                found[f"{at}.self_attention.linear_qkv.{kind}"] = torch.cat(
                    [torch.cat(group) for group in groups]
                )
        for module, names in NAMES_OF_EXPERTS.items():
            if (router := theirs.get(f"{of}.{module}.gate.weight")) is None:
                continue
            found[f"{at}.mlp.router.weight"] = router
            for expert in range(EXPERTS):
                gate, down, up = (
                    theirs[f"{of}.{module}.experts.{expert}.{name}.weight"] for name in names
                )
                to = f"{at}.mlp.experts.local_experts.{expert}"
                found[f"{to}.linear_fc1.weight"] = torch.cat((gate, up))
                found[f"{to}.linear_fc2.weight"] = down
        if f"{at}.mlp.router.weight" in found:
            continue
        up, gate = theirs[f"{of}.mlp.up_proj.weight"], theirs.get(f"{of}.mlp.gate_proj.weight")
        found[f"{at}.mlp.linear_fc1.weight"] = up if gate is None else torch.cat((gate, up))
        found[f"{at}.mlp.linear_fc2.weight"] = theirs[f"{of}.mlp.down_proj.weight"]
    return found


def _both(theirs: Mapping[str, Tensor], name: str, megatrons: str) -> Weights:
    kinds = [kind for kind in ("weight", "bias") if f"{name}.{kind}" in theirs]
    return {f"{megatrons}.{kind}": theirs[f"{name}.{kind}"] for kind in kinds}


def part(family: str, name: str, whole: Tensor, rank: int, size: int) -> Tensor:
    """Return what tensor rank `rank` of `size` has of a tensor under Megatron's name."""
    if "linear_fc1" in name and family != "nemotron":  # gate and up, each split
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    if family == "olmo3" and ("q_layernorm" in name or "k_layernorm" in name):
        return whole.chunk(size)[rank]
    if ("linear_proj" in name or "linear_fc2" in name) and "layernorm" not in name:
        return whole.chunk(size, dim=1)[rank]
    if any(key in name for key in ("linear_fc1", "linear_qkv", "word_embeddings", "output_layer")):
        return whole.chunk(size)[rank]
    return whole


def rope(family: str) -> RopeScaling:
    """Return the rotation of a family's small model."""
    if family in ROPES:
        return ROPES[family]
    return RopeScaling(
        method="default", base=BASE, partial_rotary_factor=0.5 if family == "nemotron" else 1.0
    )


def ours(
    family: str,
    weights: Weights,
    dtype: torch.dtype,
    *,
    cp: ContextParallelKind | None = None,
    memory: Mapping[str, Any] | None = None,
    **config: Any,
) -> LongContextGPT:
    """Return this rank's part of our model with weights under Megatron's names.

    `memory` holds the model's recompute, tiling and offload where they are not its defaults.
    """
    model_parallel_cuda_manual_seed(1)
    fields = {"kv_channels": HEAD_DIM, "calculate_per_token_loss": True, **OURS[family], **config}
    if family in WITH_EXPERTS:
        fields["expert_model_parallel_size"] = _experts_group().size()
        etp = parallel_state.get_expert_tensor_parallel_world_size()
        fields["expert_tensor_parallel_size"] = etp
    model = LongContextGPT(
        configuration(dtype, **fields),
        rope=rope(family),
        vocab_size=VOCAB,
        max_sequence_length=64,
        cp=cp,
        ranks_per_node=8,
        share_embeddings_and_output_weights=False,
        **ARCHITECTURE.get(family, {}),
        **(memory or {}),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(of_this_rank(family, name, weights))
    return model


def of_this_rank(family: str, name: str, whole: Mapping[str, Tensor]) -> Tensor:
    """Return this rank's part of the tensor of a parameter, by its name on this rank."""
    if ".local_experts." not in name:
        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
        return part(family, name, whole[name], rank, size)
    before, _, after = name.partition(".local_experts.")
    number, _, rest = after.partition(".")
    group = _experts_group()
    number = int(number) + group.rank() * EXPERTS // group.size()
    rank = parallel_state.get_expert_tensor_parallel_rank()
    size = parallel_state.get_expert_tensor_parallel_world_size()
    return part(family, name, whole[f"{before}.local_experts.{number}.{rest}"], rank, size)


def _experts_group() -> torch.distributed.ProcessGroup:
    return parallel_state.get_expert_model_parallel_group()
