# SPDX-License-Identifier: Apache-2.0
"""Numbers of a step's memory that depend on the implementation of its kernels: ours, and peers'."""

from dataclasses import dataclass, replace
from functools import lru_cache

from recipes.spec.cluster import Cluster
from recipes.spec.families import Family
from recipes.spec.memory_constants import MemoryConstants


@dataclass(frozen=True, kw_only=True, slots=True)
class Scratch:
    """What an attention kernel holds in its backward, in bytes per number of q, k and v."""

    queries: float = 0
    """Of a query: its gradient is summed in fp32."""
    shared: float = 0
    """Of a query, if query heads share keys: their gradients of k and v before they are summed."""
    keys: float = 0
    """Of a key, if query heads share keys: gradients of k and v summed in fp32."""

    def bytes_of(self, heads: int, kv_heads: int) -> float:
        """Return bytes per token and per number of a head."""
        sharing = kv_heads < heads
        return self.queries * heads + sharing * (self.shared * heads + self.keys * kv_heads)


FLASH_2 = Scratch(queries=4, shared=4)
"""FlashAttention-2, PyTorch's copy of it, and cuDNN: `dq_accum` and `dk_expanded` in
`csrc/flash_attn/flash_api.cpp`, `dQ_accum` and `dK_fullhead` in cudnn-frontend's
`scaled_dot_product_flash_attention.h`."""
FLASH_3 = Scratch(queries=4, keys=8)
"""FlashAttention-3: `dq_accum` and `dk_accum` in `hopper/flash_api.cpp`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Bytes that depend on the implementation of the kernels."""

    mlp_kept: float
    """Numbers kept of a gated MLP with SiLU, in units of F."""
    gelu_kept: float
    """Numbers kept of one with GELU: Megatron-Core does not fuse it with the product."""
    mlp_gradients: float = 2
    """Numbers of its gradients in addition to those, in units of F."""
    logit_bytes: float
    """Bytes per logit of a bf16 model without tiling: Megatron's are bf16, its cross-entropy
    fp32."""
    norm_kept: float = 1
    """Numbers kept of a norm in addition to its input, in units of h."""
    exchange_copies: float = 0
    """Copies of q, k and v that an all-to-all makes in addition to the exchanged ones."""
    fused_qkv: bool = True
    """Whether q, k and v are parts of one product, which v keeps until its backward."""
    norm_copies: bool = True
    """Whether a norm keeps a copy of keys that are a part of that product."""
    holds_output: bool = False
    """Whether the backward of a recomputed layer holds the output that it has rebuilt."""
    attention: Scratch = Scratch()
    on_host: tuple[str, ...] = ()
    """Categories of state, out of weights and gradients, of which only what is in use is on the
    device."""
    weight_gradients: bool = False
    """Whether a weight's gradient exists before it is added to the buffer."""
    gradient_bytes: float = 4
    """Bytes per weight."""
    reserve_gib: float
    """CUDA's context, NCCL's buffers, workspaces, and fragmentation of the allocator."""
    unknown_inputs: float = 0
    """Buffers that the formulas do not know, in inputs of a layer."""

    def kept_of(self, family: Family) -> float:
        """Return the numbers kept of an MLP of a family, in units of F."""
        if not family.gated:
            return 2
        return self.mlp_kept if family.activation == "silu" else self.gelu_kept


PLAIN = Kernels(
    mlp_kept=5,
    gelu_kept=11,
    logit_bytes=6,
    norm_copies=False,
    weight_gradients=True,
    reserve_gib=0,
)
"""CPU: unfused PyTorch operators. GELU's formula keeps six more numbers than its result."""
FUSED = Kernels(
    mlp_kept=3,
    gelu_kept=5,
    logit_bytes=6,
    attention=FLASH_2,
    reserve_gib=MemoryConstants().reserve_gib,
)
"""GPU: fused SwiGLU and gradient accumulation, and the attention kernel that holds the most. GELU
is compiled, so its formula keeps nothing itself."""
HUGGING_FACE = Kernels(
    mlp_kept=4,
    gelu_kept=4,
    logit_bytes=14,
    norm_kept=4,
    fused_qkv=False,
    exchange_copies=1,
    holds_output=True,
    attention=FLASH_2,
    on_host=("gradients",),
    gradient_bytes=2,
    reserve_gib=4.0,
)
"""A peer, to compare the formulas with published lengths: transformers' Llama under DeepSpeed with
Adam on the host, which takes the gradients too (ALST, arXiv 2506.13996). Its norm keeps an fp32
copy of its input and the result before its weight, its loss three fp32 copies of the bf16 logits;
DeepSpeed's all-to-all makes its input contiguous and permutes its output."""
LIGER = replace(HUGGING_FACE, mlp_kept=3, gelu_kept=3, mlp_gradients=1, norm_kept=1)
"""The same with Liger's norm and SwiGLU (arXiv 2410.10989), which ALST's recipes have
from tiled loss on: a norm keeps its result alone, and gradients of gate and up overwrite them."""


@lru_cache(maxsize=64)
def kernels_on(cluster: Cluster) -> Kernels:
    """Return those of GPUs with the constants that the cluster file states."""
    found = cluster.memory
    return replace(FUSED, reserve_gib=found.reserve_gib, unknown_inputs=found.unknown_inputs)
