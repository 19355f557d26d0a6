# SPDX-License-Identifier: Apache-2.0
"""Other projects' context parallelism on CPU, through their own interfaces.

    DeepSpeed         DistributedAttention, all-to-all over a contiguous shard
    yunchang          UlyssesAttention, the same
    PyTorch's ring    the schedule of torch.distributed's context parallelism, zigzag

What each needs to run here is said where it is made. All attend by PyTorch's own scaled dot
product attention or the operators below it, which are ours too, so what differs is parallelism.
All get q, k, v as a projection leaves them, the heads of a token together, [b, s, h, D].

Peers that are left out, and why, are `LEFT_OUT`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness.machine import version
from custom_modules.attention.registry import CPU_FLASH

LEFT_OUT = {
    "torch `context_parallel` as documented": (
        "has no sharding rule for the CPU's flash operator and raises; its ring runs here below "
        "that entry, with the operators given"
    ),
    "yunchang `LongContextAttention`, ring-flash-attention": (
        "call the flash-attn package, which is CUDA's; over a stand-in made of the CPU's "
        "operators their fp32 gradients are wrong"
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One peer, not yet made: it may be missing, or fail."""

    name: str
    kind: str
    package: str
    sharding: Literal["contiguous", "zigzag"]
    made: Callable[[dist.ProcessGroup], Callable[[Tensor, Tensor, Tensor], Tensor]]

    @property
    def missing(self) -> str:
        """Why it cannot be made here; empty where it can."""
        if version(self.package) is None:
            return "not installed: pip install -e '.[bench]'"
        return ""


def attend_whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention [b, S, h, D] of whole sequences, by PyTorch alone."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def _deepspeed(group: dist.ProcessGroup) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    # Named so, it takes torch's collectives as they are; "cpu" compiles some of its own.
    os.environ.setdefault("DS_ACCELERATOR", "cuda")
    comm = import_module("deepspeed.comm")
    layer = import_module("deepspeed.sequence.layer")
    comm.init_distributed("gloo", verbose=False, dist_init_required=False)
    attention = layer.DistributedAttention(attend_whole, group, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: attention(q, k, v, 0)


def _yunchang(group: dist.ProcessGroup) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    kernels, package = import_module("yunchang.kernels"), import_module("yunchang")
    attention = package.UlyssesAttention(group, attn_type=kernels.AttnType.TORCH_MATH)
    attention.attn_fn = _as_flash_attn  # none of its own has a backward on CPU
    return lambda q, k, v: attention(q, k, v, causal=True)


def _as_flash_attn(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: Any) -> Tensor:
    """Take what yunchang passes to flash-attn."""
    assert causal
    return attend_whole(q, k, v)


def _torch_ring(rotation: str) -> Callable[..., Callable[[Tensor, Tensor, Tensor], Tensor]]:
    def made(group: dist.ProcessGroup) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        ring = import_module("torch.distributed.tensor.experimental._context_parallel._attention")

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ring.set_rotate_method(rotation)  # of the process: another contestant sets another
            heads_first = (t.transpose(1, 2) for t in (q, k, v))
            out: Tensor = _TorchRing.apply(*heads_first, group, ring)
            return out.transpose(1, 2)

        return attend

    return made


class _TorchRing(torch.autograd.Function):
    """PyTorch's ring forward and backward, [b, h, s, D], over the CPU's operators."""

    @staticmethod
    def forward(ctx, q, k, v, group, ring):  # type: ignore[no-untyped-def]
        out, lse = ring._templated_ring_attention(
            group, 2, _cpu_forward, q, k, v, is_causal=True
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.ring = group, ring
        return out

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        gradients = ctx.ring._templated_ring_attention_backward(
            ctx.group, 2, _cpu_backward, grad_out, "grad_out", *ctx.saved_tensors, is_causal=True
        )
        return *gradients, None, None


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    return CPU_FLASH.forward(q, k, v, is_causal, None)


def _cpu_backward(
    *, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
    logsumexp: Tensor, is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return CPU_FLASH.backward(grad_out, query, key, value, out, logsumexp, is_causal, None)


DEEPSPEED = Peer(
    name="DeepSpeed",
    kind="ulysses",
    package="deepspeed",
    sharding="contiguous",
    made=_deepspeed,
)
YUNCHANG = Peer(
    name="yunchang",
    kind="ulysses",
    package="yunchang",
    sharding="contiguous",
    made=_yunchang,
)
TORCH_RINGS = [
    Peer(
        name=f"torch ring, {rotation}",
        kind="ring",
        package="torch",
        sharding="zigzag",
        made=_torch_ring(rotation),
    )
    for rotation in ("alltoall", "allgather")
]
PEERS = [DEEPSPEED, YUNCHANG, *TORCH_RINGS]


def deepspeed_tiled_loss() -> Any:
    """Return DeepSpeed's autograd function of a loss over tiles of the sequence."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda")  # as for its attention
    return import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledFusedLogitsLoss


def deepspeed_tiled_mlp() -> Any:
    """Return DeepSpeed's autograd function of an MLP over tiles of the sequence."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda")
    return import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledMLP
