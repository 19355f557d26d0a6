# SPDX-License-Identifier: Apache-2.0
"""The central abstraction: an attention kernel is a pair of functions.

    forward(q, k, v, causal)                      -> out, lse
    backward(grad_out, q, k, v, out, lse, causal) -> dq, dk, dv

with q, out [b, h, s, D], k, v [b, g, s, D] (g KV heads, g divides h), lse fp32 [b, h, s] (float64
for float64 inputs). Having the log-sum-exp outside the kernel is what ring merging and
kept-attention recompute need, so every parallel attention is written once over this pair.

`kernel_for` picks by device and dtype, and says in an error what was asked for where nothing fits:

* `cpu_flash`: PyTorch's CPU flash operator, float64 included;
* `cuda_flash`: PyTorch's CUDA flash operator (bf16, fp16).

The operators take equal numbers of query and KV heads, so KV heads are expanded for the call and
their gradients summed: 2 * b * (h - g) * s * D extra elements while a kernel runs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """A forward and its backward, under one name."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]
    ]


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def _cpu_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, causal
    )
    return dq, dk, dv


def _cuda_flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    return out, lse


def _cuda_flash_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)  # state of a generator unused
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, no_dropout,
        no_dropout,
    )  # fmt: skip
    return dq, dk, dv


CPU_FLASH = AttentionKernel("cpu_flash", _cpu_forward, _cpu_backward)
CUDA_FLASH = AttentionKernel("cuda_flash", _cuda_flash_forward, _cuda_flash_backward)


def kernel_for(q: Tensor) -> AttentionKernel:
    """Return the kernel for the device and dtype of `q`; raise ValueError where there is none."""
    if q.device.type == "cpu":
        return CPU_FLASH
    if q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16):
        return CUDA_FLASH
    raise ValueError(
        f"no attention kernel for {q.dtype} on {q.device.type}; bf16 and fp16 on cuda and "
        "any floating dtype on cpu have one"
    )


class _Attention(torch.autograd.Function):
    """Attention by a kernel pair; saves q, k, v, out (each s * D elements a head) and lse (s)."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.kernel, ctx.causal = kernel_for(q), causal
        repeats = q.shape[1] // k.shape[1]
        out, lse = ctx.kernel.forward(q, _expand(k, repeats), _expand(v, repeats), causal)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        q, k, v, out, lse = ctx.saved_tensors
        repeats = q.shape[1] // k.shape[1]
        dq, dk, dv = ctx.kernel.backward(
            grad_out, q, _expand(k, repeats), _expand(v, repeats), out, lse, ctx.causal
        )
        return dq, _fold(dk, repeats), _fold(dv, repeats), None


def _expand(kv: Tensor, repeats: int) -> Tensor:
    return kv.repeat_interleave(repeats, dim=1) if repeats > 1 else kv


def _fold(grad: Tensor, repeats: int) -> Tensor:
    return grad.unflatten(1, (-1, repeats)).sum(2) if repeats > 1 else grad


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v for q [b, h, s, D] and k, v [b, g, s, D]."""
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} KV heads evenly")
    return _Attention.apply(q, k, v, causal)
