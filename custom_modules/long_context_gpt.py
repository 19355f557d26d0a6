# SPDX-License-Identifier: Apache-2.0
"""A Megatron-Core GPT with our modules in it: rotation, attention, norm.

What differs from `megatron.core.models.gpt.GPTModel`:

* rotary tables come from the position ids of this rank (`custom_modules.rope`), on every pipeline
  stage, and the rotation is fp32;
* attention is a kernel pair with all-to-all context parallelism around it
  (`custom_modules.attention_kernels`, `custom_modules.ulysses`); no mask is ever materialised;
* the norm's weight is marked for sequence parallelism, so it works without Transformer Engine.

The model takes `position_ids` [b, s] on every pipeline stage, not only on the first. Everything
else (embedding, linear layers, MLP, LM head, loss, sharded state dict) is Megatron-Core's, so
checkpoints have its names and reshard by its rules.

    model = LongContextGPT(config, rope=RopeScaling.base_change(10_000), vocab_size=2048,
                           max_sequence_length=8192)
"""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from custom_modules.attention_kernels import attention
from custom_modules.rope import inverse_frequencies, rotary_table, rotate
from custom_modules.rope_scaling import RopeScaling
from custom_modules.ulysses import gather_sequence, scatter_sequence


class RMSNorm(nn.Module):
    """`t / sqrt(mean(t^2) + eps) * weight` over the last dimension, fp32 inside."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        """Take the arguments by which Megatron-Core builds a norm."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each TP rank sees a part of the sequence: Megatron sums this weight's gradient over TP.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, t: Tensor) -> Tensor:
        """Return `t` [..., h] normalised, in its dtype."""
        return nn.functional.rms_norm(t, self.weight.shape, self.weight, self.eps)


class ContextParallelAttention(nn.Module):
    """Core attention of one layer over the whole sequence, whatever part of it this rank holds."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        pg_collection: ProcessGroupCollection,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
    ) -> None:
        """Take the arguments by which Megatron-Core builds core attention.

        Raises ValueError for what the kernel pair does not compute: dropout, another scale.
        """
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(f"attention_dropout is {dropout}; long-context attention has none")
        if softmax_scale is not None:
            raise ValueError(f"softmax_scale is {softmax_scale}; only 1/sqrt(head size) is known")
        self.group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Return causal attention [s, b, h * D] for query [s, b, h, D], key, value [s, b, g, D]."""
        if self.group.size() > 1:
            query, key, value = (gather_sequence(t, self.group) for t in (query, key, value))
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = attention(q, k, v, causal=True).permute(2, 0, 1, 3)
        if self.group.size() > 1:
            out = scatter_sequence(out, self.group)
        return out.flatten(2)


class LongContextSelfAttention(SelfAttention):
    """Megatron's self-attention with our rotation between projection and core attention."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor,
        **megatron: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return output [s, b, h] and bias; `rotary_pos_emb` is the stacked cos and sin.

        `megatron` holds what `TransformerLayer` passes to every attention, for inference and
        packing; anything set there has no effect here and is refused.
        """
        given = [name for name, value in megatron.items() if value is not None]
        if given:
            raise ValueError(f"long-context attention does not take {', '.join(given)}")
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        cos, sin = rotary_pos_emb
        out = self.core_attention(rotate(query, cos, sin), rotate(key, cos, sin), value)
        return self.linear_proj(out)


def long_context_spec(
    config: TransformerConfig, *, transformer_engine: bool = False, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage with our modules in them.

    With `transformer_engine` its linear layers and norms are used, else Megatron-Core's own.
    """
    norm: type[nn.Module]
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_with_transformer_engine_spec,
        )

        layer, norm = get_gpt_layer_with_transformer_engine_spec(), TENorm
    else:
        layer, norm = get_gpt_layer_local_spec(normalization=config.normalization), RMSNorm
        layer.submodules.input_layernorm = norm
        layer.submodules.pre_mlp_layernorm = norm
    layer.submodules.self_attention.module = LongContextSelfAttention
    layer.submodules.self_attention.submodules.core_attention = ContextParallelAttention
    layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)


class LongContextGPT(GPTModel):
    """Megatron-Core's GPTModel over `long_context_spec`, rotated by a `RopeScaling`."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        rope: RopeScaling,
        vocab_size: int,
        max_sequence_length: int,
        transformer_engine: bool = False,
        vp_stage: int | None = None,
        **megatron: Any,
    ) -> None:
        """Build this pipeline stage; `megatron` is passed on to `GPTModel`."""
        super().__init__(
            config,
            transformer_layer_spec=long_context_spec(
                config, transformer_engine=transformer_engine, vp_stage=vp_stage
            ),
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
            position_embedding_type="none",
            vp_stage=vp_stage,
            **megatron,
        )
        # Not a buffer: a model cast to bf16 would cast it too.
        self.frequencies, self.temperature = inverse_frequencies(rope, config.kv_channels)

    def _preprocess(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        decoder_input: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[Tensor | None, Tensor, None, None, None]:
        """Embed on the first stage; make the rotary table of this rank's positions on every one."""
        if decoder_input is None and self.pre_process:
            decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)
        frequencies = self.frequencies.to(position_ids.device)
        table = torch.stack(rotary_table(position_ids, frequencies, self.temperature))
        return decoder_input, table, None, None, None
