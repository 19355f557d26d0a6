# SPDX-License-Identifier: Apache-2.0
"""A Megatron-Core GPT with this package's rotation, attention, norm and memory.

Differences from `megatron.core.models.gpt.GPTModel`:

* rotary tables come from the position ids of this rank (`custom_modules.rope.rotary`), on every
  pipeline stage, and the rotation is fp32;
* attention is a kernel pair with any kind of context parallelism around it
  (`custom_modules.gpt.core_attention`); no mask is ever materialised, and attention stays within
  documents if a table of them is given as `packed_seq_params`;
* layers may differ: a window, another rotation or none (`custom_modules.rope.layers`), and a family
  may have its norms elsewhere (`custom_modules.gpt.block`);
* the norm's parameters are marked for sequence parallelism, so it works without Transformer Engine;
* experts, if the config has them, are routed the same way on any number of ranks;
* optionally (`custom_modules.memory.config`) layers are rebuilt in the backward, their kept tensors
  wait in host memory, and MLP and loss take the sequence a tile at a time.

The model takes `position_ids` [b, s] on every pipeline stage, not only on the first. Everything
else (embedding, linear layers, MLP, LM head, loss, sharded state dict) is Megatron-Core's, so
checkpoints have its names and reshard by its rules.

    model = LongContextGPT(config, rope=RopeScaling.base_change(10_000), vocab_size=2048,
                           max_sequence_length=8192, cp=ContextParallelKind(kind="ring"))

`long_context_spec` alone is a layer spec for a plain `GPTModel`, with its own rotary embedding.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import WrappedTensor
from torch import Tensor, nn

from custom_modules.attention.registry import KernelName
from custom_modules.context_parallel.config import TRANSFORMER_ENGINE_KINDS, ContextParallelKind
from custom_modules.gpt.block import LLAMA, Block, shape_layer
from custom_modules.gpt.core_attention import ContextParallelAttention, TransformerEngineAttention
from custom_modules.gpt.layer import LongContextLayer
from custom_modules.gpt.megatron_releases import preprocessed, require_unset
from custom_modules.gpt.moe_router import refuse_experts
from custom_modules.gpt.norm import norm_of
from custom_modules.gpt.output_layer import loss_of, refuse_output_layer
from custom_modules.gpt.self_attention import LongContextSelfAttention
from custom_modules.gpt.vocabulary import clear_padding, hide_padding, padded_vocabulary
from custom_modules.memory.config import (
    KEEP_ALL,
    MEGATRON_KINDS,
    ON_DEVICE,
    UNTILED,
    Offload,
    Recompute,
    Tiling,
)
from custom_modules.memory.host_offload import HostOffload
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.layers import LayerPattern
from custom_modules.rope.rotary import Rotation
from custom_modules.rope.skipped_positions import scaled_table


def long_context_spec(
    config: TransformerConfig,
    *,
    cp: ContextParallelKind | None = None,
    kernel: KernelName = "auto",
    seq_length: int = 0,
    ranks_per_node: int = 8,
    transformer_engine: bool = False,
    recompute: Recompute = KEEP_ALL,
    tiling: Tiling = UNTILED,
    offload: Offload = ON_DEVICE,
    pattern: LayerPattern | None = None,
    block: Block = LLAMA,
    vp_stage: int | None = None,
) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage with this package's modules.

    With `transformer_engine` its linear layers and norms are used, else Megatron-Core's own. `cp`
    is the kind of context parallelism (None: chosen, for `seq_length` tokens over all ranks and
    `ranks_per_node` ranks that share the fast link, by default a DGX's). `recompute`, `tiling` and
    `offload` determine what layers keep for their backward, and where; the model tiles the loss.
    `pattern` says which layers have a window or another rotation, `block` which norms all have.
    Raises ValueError for Transformer Engine's kinds without it, with kept attention or a window,
    and for choices of memory that exclude each other.
    """
    cp = cp or ContextParallelKind()
    ours = norm_of(config)
    refuse_experts(config, tiling, transformer_engine=transformer_engine)
    if cp.kind == "auto" and seq_length < 1:
        raise ValueError("context parallel kind auto chooses by length; give seq_length")
    if cp.kind in TRANSFORMER_ENGINE_KINDS and kernel != "auto":
        raise ValueError(
            f"kernel {kernel} has no effect on context parallel kind {cp.kind}, which computes by "
            "Transformer Engine's own choice; leave it out"
        )
    if recompute.kind in MEGATRON_KINDS and config.recompute_granularity is None:
        raise ValueError(
            f"recompute {recompute.kind} is Megatron-Core's: set recompute_granularity, "
            "recompute_method and related fields in the config (Recompute.megatron_settings)"
        )
    selected = config.recompute_granularity == "selective" and config.recompute_modules
    if selected and "layernorm" in selected and not transformer_engine:
        raise ValueError(
            "recompute_modules with layernorm: Megatron-Core 0.15.3 runs it with Transformer "
            "Engine only, and this model runs without it; its norm keeps only its input anyway"
        )
    if offload.tensors != "none" and vp_stage is not None:
        raise ValueError(
            f"offload {offload.tensors} with virtual pipeline stage {vp_stage}: each stage would "
            "pin up to cap_gib for itself; leave one out"
        )
    if (why := offload.refusal(recompute)) is not None:
        raise ValueError(why)
    kept = "kept_attention" in (recompute.kind, recompute.others)
    if kept and cp.kind in TRANSFORMER_ENGINE_KINDS:
        raise ValueError(
            f"recompute kept_attention with context parallel kind {cp.kind}, whose output only "
            "Transformer Engine can keep; take ring, ulysses, head_chunked or hybrid"
        )
    if pattern is not None and pattern.window and cp.kind in TRANSFORMER_ENGINE_KINDS:
        raise ValueError(
            f"a window of {pattern.window:,} tokens with context parallel kind {cp.kind}, which "
            "is Transformer Engine's and has none here; take ring, ulysses, head_chunked or hybrid"
        )
    qk_layernorm = config.qk_layernorm
    core: dict[str, Any] = {"cp": cp, "seq_length": seq_length, "ranks_per_node": ranks_per_node}
    if cp.kind in TRANSFORMER_ENGINE_KINDS:
        if not transformer_engine:
            raise ValueError(
                f"context parallel kind {cp.kind} is Transformer Engine's, which this model does "
                "not use; take ring, ulysses, head_chunked or hybrid"
            )
        core_attention = ModuleSpec(module=TransformerEngineAttention, params=core)
    else:
        core_attention = ModuleSpec(
            module=ContextParallelAttention,
            params={**core, "kernel": kernel, "pattern": pattern, "chunks": not block.wide_qk_norm},
        )
    norm: type[nn.Module]
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_with_transformer_engine_spec,
        )

        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=qk_layernorm,
        )
        norm = TENorm
        if cp.may_chunk_heads:
            # Then attention projects by itself, so the norm cannot be inside the projection. In a
            # checkpoint it keeps the fused layer's name; Transformer Engine's own norm would add a
            # state that the fused layer does not have.
            layer.submodules.input_layernorm = ours
            layer.submodules.self_attention.submodules.linear_qkv = TEColumnParallelLinear
            layer.submodules.sharded_state_dict_keys_map["input_layernorm."] = (
                "self_attention.linear_qkv.layer_norm_"
            )
    else:
        layer = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            normalization=config.normalization,
            qk_layernorm=qk_layernorm,
        )
        norm = ours
        layer.submodules.input_layernorm = norm
        layer.submodules.pre_mlp_layernorm = norm
        if qk_layernorm:
            layer.submodules.self_attention.submodules.q_layernorm = norm
            layer.submodules.self_attention.submodules.k_layernorm = norm
        if config.num_moe_experts:
            # Transformer Engine has this norm apart from experts, under its own name.
            del layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    shape_layer(layer.submodules, config, block, transformer_engine=transformer_engine)
    layer.submodules.self_attention.module = LongContextSelfAttention
    layer.submodules.self_attention.params["pattern"] = pattern
    layer.submodules.self_attention.submodules.core_attention = core_attention
    layers = get_num_layers_to_build(config, vp_stage)
    first = get_transformer_layer_offset(config, vp_stage) + 1
    kinds = {number: recompute.of_layer(number) for number in range(first, first + layers)}
    layer.module = LongContextLayer
    layer.params = {
        "recompute": recompute,
        "tiling": tiling,
        "offload": None
        if offload.tensors == "none"
        else HostOffload(
            offload,
            {number: kind for number, kind in kinds.items() if kind != "none"},
            input_stays=first if first > 1 else None,
            ranks_per_node=_ranks_here(ranks_per_node),
        ),
    }
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)


def _ranks_here(ranks_per_node: int) -> int:
    """Return how many ranks share this host's memory: not more than there are at all."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return min(ranks_per_node, ranks)


class LongContextGPT(GPTModel):
    """Megatron-Core's GPTModel over `long_context_spec`, rotated by a `RopeScaling`."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        rope: RopeScaling,
        vocab_size: int,
        max_sequence_length: int,
        cp: ContextParallelKind | None = None,
        kernel: KernelName = "auto",
        ranks_per_node: int = 8,
        transformer_engine: bool = False,
        recompute: Recompute = KEEP_ALL,
        tiling: Tiling = UNTILED,
        offload: Offload = ON_DEVICE,
        pattern: LayerPattern | None = None,
        block: Block = LLAMA,
        vp_stage: int | None = None,
        **megatron: Any,
    ) -> None:
        """Build this pipeline stage; `megatron` is passed on to `GPTModel`.

        `vocab_size` is the number of tokens; embedding and LM head have more rows if the config's
        tensor parallelism does not divide it.
        """
        super().__init__(
            config,
            transformer_layer_spec=long_context_spec(
                config,
                cp=cp,
                kernel=kernel,
                seq_length=max_sequence_length,
                ranks_per_node=ranks_per_node,
                transformer_engine=transformer_engine,
                recompute=recompute,
                tiling=tiling,
                offload=offload,
                pattern=pattern,
                block=block,
                vp_stage=vp_stage,
            ),
            vocab_size=padded_vocabulary(vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=max_sequence_length,
            position_embedding_type="none",
            vp_stage=vp_stage,
            **megatron,
        )
        if self.mtp_process and (pattern is not None or block != LLAMA):
            raise ValueError(
                "mtp_num_layers with layers that differ or norms after them: multi-token "
                "prediction has layers and an embedding of its own; leave it out"
            )
        self.vocabulary = vocab_size
        if self.vocabulary != self.vocab_size:
            self._exclude_padding()
        self.loss_tile = tiling.loss_tile if tiling.loss else None
        if self.loss_tile is not None and self.post_process:
            if self.mtp_process:
                raise ValueError(
                    "tiling loss with mtp_num_layers: multi-token prediction forms the logits of "
                    "each of its layers; leave one out"
                )
            refuse_output_layer(self.output_layer)
        if rope.interleaved != config.rotary_interleaved:
            raise ValueError(
                f"interleaved of the rotation is {rope.interleaved} and rotary_interleaved of the "
                f"config {config.rotary_interleaved}; set both to one value"
            )
        # Not a buffer: a model cast to bf16 would cast it too.
        self.rotation = Rotation(rope, config.kv_channels)
        self.rope_scale: Tensor | None = None
        self.pattern = pattern
        own = None if pattern is None else pattern.local_rope
        self.local_rotation = None if own is None else Rotation(own, config.kv_channels)
        self.embedding_scale = config.hidden_size**0.5 if block.scaled_embedding else None

    def _exclude_padding(self) -> None:
        """Set this rank's padding of the vocabulary to 0, and keep its logits out of any loss."""
        of_rank = {"vocabulary": self.vocabulary, "rank": self.pg_collection.tp.rank()}
        if self.pre_process:
            clear_padding(self.embedding.word_embeddings.weight, **of_rank)
        if self.post_process:
            if self.output_layer.weight is not None:  # otherwise the embedding's
                clear_padding(self.output_layer.weight, **of_rank)
            hide_padding(self.output_layer, **of_rank)

    def forward(self, *inputs: Any, rope_scale: Tensor | None = None, **megatron: Any) -> Tensor:
        """Return what `GPTModel.forward` does.

        `rope_scale`, float64 [b] on the CPU, is the scale of each sequence if GeNE draws them
        (`custom_modules.rope.skipped_positions`); without it the rotation is the model's own.
        """
        self.rope_scale = rope_scale
        out: Tensor = super().forward(*inputs, **megatron)
        return out

    def _postprocess(
        self,
        hidden_states: Tensor,
        *,
        labels: Tensor | None,
        loss_mask: Tensor | None = None,
        **megatron: Any,
    ) -> Tensor:
        """Return losses [b, s] if there are labels, else logits [b, s, V], padding included.

        With a tiled loss `loss_mask` [b, s] names the tokens to compute; the others get 0.
        """
        if self.loss_tile is None or labels is None or not self.post_process:
            out: Tensor = super()._postprocess(
                hidden_states, labels=labels, loss_mask=loss_mask, **megatron
            )
            return out
        tied = self.share_embeddings_and_output_weights
        return loss_of(
            self.output_layer,
            hidden_states,
            labels,
            loss_mask,
            tile=self.loss_tile,
            vocabulary=self.vocabulary,
            weight=self.shared_embedding_or_output_weight() if tied else None,
        )

    def _preprocess(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        decoder_input: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **later: Any,
    ) -> tuple[WrappedTensor | Tensor | None, ...]:
        """Embed on the first stage; make the rotary table of this rank's positions on every one."""
        require_unset(later)
        if decoder_input is None and self.pre_process:
            decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)
            if self.embedding_scale is not None:  # rounded to the dtype, as in transformers
                scale = torch.tensor(self.embedding_scale, dtype=decoder_input.dtype)
                decoder_input = decoder_input * scale.item()
        if decoder_input is not None:  # otherwise GPTModel would hold it through the whole forward
            decoder_input = WrappedTensor(decoder_input)
        length = position_ids.shape[1] * self.cp_group.size()
        if self.rope_scale is None:
            table = self.rotation.table(position_ids, length)
        else:
            table = scaled_table(self.rotation, position_ids, length, self.rope_scale)
        if self.local_rotation is not None:
            table = torch.stack((table, self.local_rotation.table(position_ids, length)))
        return preprocessed(decoder_input, table, later)
