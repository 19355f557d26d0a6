# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's self-attention with fp32 rotation, documents and head-chunked attention.

`LongContextSelfAttention` takes the place of Megatron's self-attention around a core attention of
`custom_modules.gpt.core_attention`: it rotates in fp32, takes documents, and hands head-chunked
attention the layer's input, since there the projection belongs to the stages.

Rotation comes as cos and sin of this rank's positions, stacked (what `LongContextGPT` makes), or as
the angles that a plain `GPTModel` makes.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from custom_modules.attention.documents import Documents
from custom_modules.attention.qkv_projection import Projection
from custom_modules.gpt.block import WideNorm
from custom_modules.gpt.core_attention import documents_of, refuse_without_effect
from custom_modules.gpt.param_gather import finish_gather
from custom_modules.rope.layers import LayerPattern, Turn
from custom_modules.rope.rotary import rotate


class LongContextSelfAttention(SelfAttention):
    """Megatron's self-attention with fp32 rotation, documents, and head-chunked attention."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        pattern: LayerPattern | None = None,
        wide_qk_norm: bool = False,
        **kwargs: Any,
    ) -> None:
        """Take Megatron-Core's arguments of self-attention, and which layers differ.

        With `wide_qk_norm` queries and keys are normalised over all heads of a token.
        Raises ValueError for settings of the config that would have no effect here.
        """
        super().__init__(config, *args, **kwargs)
        if wide_qk_norm:  # from Megatron-Core 0.18 on, refused in a spec without qk_layernorm
            heads = config.num_attention_heads
            of_head = (config, self.hidden_size_per_attention_head, config.layernorm_epsilon)
            self.q_layernorm = WideNorm(*of_head, heads=heads)
            self.k_layernorm = WideNorm(*of_head, heads=config.num_query_groups or heads)
        self.turn: Turn = "stage" if pattern is None else pattern.turn_of(self.layer_number)
        if self.checkpoint_core_attention and self.is_head_chunked:
            raise ValueError(
                "recompute_granularity is 'selective' with core_attn in recompute_modules, and "
                "head-chunked attention keeps no queries, keys and values to recompute from; "
                "leave core_attn out, or take ulysses, ring or hybrid"
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: Documents | None = None,
        **megatron: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return output [s, b, hidden] and bias.

        `megatron` holds what `TransformerLayer` passes to every attention, for inference;
        anything set there has no effect here and is refused, as is a mask.
        """
        refuse_without_effect(attention_mask=attention_mask, **megatron)
        documents = documents_of(packed_seq_params)
        table = self.table_of(rotary_pos_emb)
        if self.is_head_chunked:
            out = self.core_attention.from_hidden(hidden_states, self, table, documents)
            return self.linear_proj(out)
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        if table is not None:
            cos, sin = table.unbind()
            interleaved = self.config.rotary_interleaved
            query, key = (rotate(heads, cos, sin, interleaved) for heads in (query, key))
        attend = (
            self._checkpointed_attention_forward
            if self.checkpoint_core_attention and self.training
            else self.core_attention
        )
        out = attend(
            query,
            key,
            value,
            None,
            attn_mask_type=self.attn_mask_type,
            packed_seq_params=documents,
        )
        return self.linear_proj(out)

    @property
    def is_head_chunked(self) -> bool:
        """Whether heads are projected, exchanged and attended with a few at a time."""
        return self.core_attention.degrees.heads_per_stage is not None

    def projection(self) -> Projection:
        """Return the QKV projection of this rank; raise ValueError if it is not a plain one."""
        if self.config.fp8_param:
            raise ValueError(
                "fp8_param is True: weights are stored in FP8, and head-chunked attention reads "
                "that of linear_qkv in the model's dtype; leave fp8_param out, or take ulysses"
            )
        if "weight" not in dict(self.linear_qkv.named_parameters(recurse=False)):
            raise ValueError(
                f"linear_qkv is a {type(self.linear_qkv).__name__}, whose weight cannot be read a "
                "few heads at a time; take ulysses, ring or hybrid without heads_per_stage"
            )
        finish_gather(self.linear_qkv)
        if getattr(self.linear_qkv, "layer_norm_weight", None) is not None:
            raise ValueError(
                "head-chunked attention needs the norm apart from linear_qkv; build the layer "
                "with long_context_spec and its kind"
            )
        bias = getattr(self.linear_qkv, "bias", None)
        return Projection(
            weight=self.linear_qkv.weight,
            bias=None if bias is None or bias.numel() == 0 else bias,
            heads=self.num_attention_heads_per_partition,
            kv_heads=self.num_query_groups_per_partition,
            head_dim=self.hidden_size_per_attention_head,
            q_norm=_norm(self.q_layernorm),
            k_norm=_norm(self.k_layernorm),
        )

    def table_of(self, rotary_pos_emb: Tensor | None) -> Tensor | None:
        """Return this layer's cos and sin, fp32 [2, s, b, 1, R/2]; None if it does not rotate.

        They are taken from these, from those of both kinds of layers [2, 2, s, b, 1, R/2], the
        stage's first, or from Megatron's angles [s, 1, 1, R]. Raises ValueError for settings that
        Megatron's angles do not include: another table for keys, YaRN's temperature.
        """
        if rotary_pos_emb is None or self.turn == "none":
            return None
        if isinstance(rotary_pos_emb, Tensor) and rotary_pos_emb.ndim == 6:
            return rotary_pos_emb[1 if self.turn == "local" else 0]
        if self.turn == "local":
            raise ValueError(
                f"layer {self.layer_number} has a rotation of its own, and the model makes one "
                "table; take LongContextGPT"
            )
        if isinstance(rotary_pos_emb, Tensor) and rotary_pos_emb.ndim == 5:
            return rotary_pos_emb
        if not isinstance(rotary_pos_emb, Tensor):
            raise ValueError("only one rotary table, for both queries and keys, is supported")
        # Looked up where it is called: Megatron-Bridge puts its own in that place.
        if yarn_rotary_pos_embedding._yarn_get_concentration_factor_from_config(self.config) != 1:
            raise ValueError("YaRN has a temperature; take LongContextGPT with RopeScaling.yarn")
        if self.config.rotary_interleaved:  # each angle twice in a row
            half = rotary_pos_emb[..., ::2].float()
        else:
            half = rotary_pos_emb[..., : rotary_pos_emb.shape[-1] // 2].float()
        return torch.stack((half.cos(), half.sin()))


def _norm(module: nn.Module | None) -> nn.Module | None:
    return None if isinstance(module, IdentityOp) else module
