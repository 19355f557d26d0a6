# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core adapters of core attention over a shared sequence.

`ContextParallelAttention` takes the place of a layer's core attention, by any kind of
`custom_modules.context_parallel.config`, within the layer's window if it has one.
`TransformerEngineAttention` is the core attention for Transformer Engine's own kinds.

Documents come as a `custom_modules.attention.documents.Documents`, where Megatron-Core passes its
`packed_seq_params`.
"""

import logging
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from custom_modules.attention.documents import Documents
from custom_modules.attention.kernel import AttentionKernel
from custom_modules.attention.registry import KernelName, kernel_for
from custom_modules.context_parallel.attend import attend, split_group
from custom_modules.context_parallel.config import ContextParallelKind, Degrees, degrees
from custom_modules.context_parallel.head_chunked import HeadChunked, head_chunked_attention
from custom_modules.context_parallel.head_stages import HeadStages
from custom_modules.rope.layers import LayerPattern
from custom_modules.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from custom_modules.gpt.self_attention import LongContextSelfAttention

log = logging.getLogger(__name__)

IGNORED = {
    "attention_dropout": 0.0,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "fine_grained_activation_offloading": False,
    "flash_decode": False,
    "fp8_dot_product_attention": False,
    "fp8_multi_head_attention": False,
    "fused_single_qkv_rope": False,
    "log_max_attention_logit": False,
    "multi_latent_attention": False,
    "no_rope_freq": None,
    "qk_clip": False,
    "qk_l2_norm": False,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "use_kitchen_attention": False,
    "window_size": None,
}
"""Fields of Megatron's config that this attention does not honour, and the supported value.

Some are not in every release: a config without the field has nothing to honour.
"""


def ignored_settings(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each setting that long-context attention would not honour."""
    for name, known in IGNORED.items():
        value = settings.get(name, known)
        if value != known and (value or known):
            yield f"{name} is {value!r}; long-context attention supports only {known!r}"


def refuse_ignored(config: TransformerConfig) -> None:
    """Raise ValueError for a config with a setting that this attention would ignore."""
    for sentence in ignored_settings(
        {name: getattr(config, name, known) for name, known in IGNORED.items()}
    ):
        raise ValueError(sentence)


def degrees_for(
    config: TransformerConfig,
    cp: ContextParallelKind,
    groups: ProcessGroupCollection,
    *,
    seq_length: int,
    ranks_per_node: int,
    chunks: bool = True,
) -> Degrees:
    """Resolve a kind for the model of a config over the context ranks of its groups.

    `ranks_per_node` counts all ranks that share the fast link; TP ranks are neighbours. Without
    `chunks` heads cannot be projected a few at a time.
    """
    size, tp = groups.cp.size(), groups.tp.size()
    kv_heads = config.num_query_groups or config.num_attention_heads
    if kv_heads % tp:  # Megatron-Core before 0.17 refuses it
        raise ValueError(
            f"num_query_groups is {kv_heads}, which {tp} tensor parallel ranks do not divide; "
            "long-context attention has whole KV heads on each: take fewer"
        )
    return degrees(
        cp,
        size=size,
        heads=config.num_attention_heads // tp,
        kv_heads=kv_heads // tp,
        head_dim=config.kv_channels,
        seq_length=seq_length,
        ranks_per_link=max(1, ranks_per_node // tp),
        chunks=chunks,
    )


@cache  # a line for each different choice, not for each layer
def _say(chosen: str) -> None:
    log.info("context parallelism: %s", chosen)


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
        *,
        cp: ContextParallelKind | None = None,
        kernel: KernelName = "auto",
        seq_length: int = 0,
        ranks_per_node: int = 8,
        chunks: bool = True,
        pattern: LayerPattern | None = None,
    ) -> None:
        """Take Megatron-Core's arguments of core attention, and this package's by name.

        `pattern` says whether the layer of this number, counted over all stages, has a window.
        Raises ValueError for settings that the kernel pair does not support (dropout, another
        scale, another mask), for heads that do not fit the kind, and for a kernel that cannot
        serve.
        """
        super().__init__()
        if attention_dropout:
            raise ValueError(
                f"attention_dropout is {attention_dropout}; long-context attention has none"
            )
        if softmax_scale is not None:
            raise ValueError(f"softmax_scale is {softmax_scale}; only 1/sqrt(head size) is known")
        refuse_ignored(config)
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask):
            raise ValueError(f"attention mask {attn_mask_type} is not known; only causal and none")
        self.causal = attn_mask_type == AttnMaskType.causal
        self.degrees = degrees_for(
            config,
            cp or ContextParallelKind(),
            pg_collection,
            seq_length=seq_length,
            ranks_per_node=ranks_per_node,
            chunks=chunks,
        )
        _say(str(self.degrees))
        self.groups = split_group(pg_collection.cp, self.degrees.ulysses)
        self.kernel_name = kernel
        self.window = None if pattern is None else pattern.window_of(layer_number)
        if self.window is not None and not self.causal:
            raise ValueError(f"layer {layer_number} has a window, which needs a causal mask")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Documents | None = None,
    ) -> Tensor:
        """Return attention [s, b, h * D] for query [s, b, h, D], key, value [s, b, g, D]."""
        refuse_without_effect(attention_mask=attention_mask, attention_bias=attention_bias)
        documents = documents_of(packed_seq_params)
        out = attend(
            query,
            key,
            value,
            kernel=self._kernel(query, query.shape[-1], documents),
            groups=self.groups,
            causal=self.causal,
            documents=documents,
            window=self.window,
        )
        return out.flatten(2)

    def _kernel(self, x: Tensor, head_dim: int, documents: Documents | None) -> AttentionKernel:
        several = documents is not None and max(map(len, documents.lengths)) > 1
        return kernel_for(x.device, x.dtype, head_dim, self.kernel_name, documents=several)

    def from_hidden(self, x: Tensor, layer: "LongContextSelfAttention", table: Tensor | None,
                    documents: Documents | None) -> Tensor:  # fmt: skip
        """Return attention [s, b, h * D] for the layer's input x, a few heads at a time."""
        projection = layer.projection()
        kernel = self._kernel(x, projection.head_dim, documents)
        tp = layer.pg_collection.tp
        tensor_parallel = TensorParallel(
            group=tp if tp.size() > 1 else None, sequence_parallel=layer.config.sequence_parallel
        )
        assert self.degrees.heads_per_stage is not None
        block = HeadChunked(
            projection=projection,
            stages=HeadStages(
                heads=projection.heads,
                kv_heads=projection.kv_heads,
                ranks=self.degrees.ulysses,
                heads_per_stage=self.degrees.heads_per_stage,
            ),
            kernel=self.groups.kernel(kernel, self.window),
            ulysses=self.groups.ulysses,
            tensor_parallel=tensor_parallel,
            table=None if table is None else (table[0], table[1]),
            interleaved=layer.config.rotary_interleaved,
            causal=self.causal,
            documents=documents,
        )
        return head_chunked_attention(x, block).flatten(2)


class TransformerEngineAttention(nn.Module):
    """Transformer Engine's core attention with one of its own kinds of context parallelism."""

    def __init__(
        self, config: TransformerConfig, *, cp: ContextParallelKind, seq_length: int = 0,
        ranks_per_node: int = 8, pg_collection: ProcessGroupCollection, **megatron: Any,
    ) -> None:  # fmt: skip
        """Take Megatron-Core's arguments of core attention, and this package's by name."""
        super().__init__()
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        self.degrees = degrees_for(
            config, cp, pg_collection, seq_length=seq_length, ranks_per_node=ranks_per_node
        )
        _say(str(self.degrees))
        two_levels = self.degrees.ulysses > 1 and self.degrees.ring > 1
        one_level = "a2a" if self.degrees.ulysses > 1 else "p2p"
        megatron["cp_comm_type"] = one_level if cp.kind == "a2a+p2p" else cp.kind
        self.core = TEDotProductAttention(config, pg_collection=pg_collection, **megatron)
        if two_levels:  # Megatron-Core reads these groups from a global that NeMo does not fill
            groups = split_group(pg_collection.cp, self.degrees.ulysses)
            self.core.set_context_parallel_group(
                [groups.ulysses, groups.ring],
                dist.get_process_group_ranks(pg_collection.cp),
                TEDotProductAttention.cp_stream,
                "a2a+p2p",
            )

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                attn_mask_type: AttnMaskType, **megatron: Any) -> Tensor:  # fmt: skip
        """Return attention [s, b, h * D]; raise ValueError for documents kept apart."""
        if megatron.get("packed_seq_params") is not None:
            raise ValueError(
                f"context parallel kind {self.degrees.kind} is Transformer Engine's, which keeps "
                "documents apart only where each is padded to a multiple of 2 x CP; take ring, "
                "ulysses, head_chunked or hybrid"
            )
        return self.core(query, key, value, attention_mask, attn_mask_type, **megatron)


def documents_of(packed_seq_params: Any) -> Documents | None:
    """Return the table; raise ValueError for Megatron's own packing, whose batch is flattened."""
    if packed_seq_params is None or isinstance(packed_seq_params, Documents):
        return packed_seq_params
    raise ValueError(
        f"packed_seq_params is a {type(packed_seq_params).__name__}; long-context attention takes "
        "documents as custom_modules.attention.documents.Documents (from_cu_seqlens makes one)"
    )


def refuse_without_effect(**without_effect: Any) -> None:
    """Raise ValueError for arguments that are set but would have no effect."""
    given = [name for name, value in without_effect.items() if value is not None]
    if given:
        raise ValueError(
            f"long-context attention does not take {', '.join(given)}; it is causal or whole by "
            "its layer, and documents go in as packed_seq_params"
        )
