# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's fused attention over cuDNN, in its form for any length.

    transformer_engine    fused_attn_fwd and fused_attn_bwd of transformer_engine.pytorch, 2.9

The kernels are cuDNN's, as in `custom_modules.attention.pytorch_cuda`, but planned by the cuDNN
that Transformer Engine was built against, which may be newer than PyTorch's. The contract of
Transformer Engine's own ring attention is used: the forward's first auxiliary tensor is the
log-sum-exp of the scaled scores, max + log(sum(exp(x - max))), fp32 [b, h, s, 1]; the backward
takes one of a longer attention in its place, together with that attention's out.

The layout is bshd_bshd_bshd, [b, s, h, D] without gaps: Transformer Engine computes strides from
the sizes. Tensors of another memory layout are copied, b s (h + 2 g) D elements forward and
b s (3 h + 2 g) D backward. KV heads are not expanded. Documents are one call each, with a plan for
each pair of lengths; a single query or a single key, for which not every release of cuDNN has a
plan, goes to PyTorch's flash operator.

Legend as in `custom_modules.attention.kernel`.
"""

from typing import Any

import torch
from torch import Tensor

from custom_modules.attention.kernel import AttentionKernel, by_document
from custom_modules.attention.pytorch_cuda import (
    cuda_refusal,
    flash_backward,
    flash_forward,
    package_refusal,
)

_RELEASES = ("2.9",)


def _refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    # Gradients of larger heads exist for some releases of cuDNN on some devices.
    refusal = cuda_refusal(device, dtype, head_dim, largest_head=128, capability=(8, 0))
    return refusal or package_refusal("transformer-engine", _RELEASES, "make gpu")


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    if 1 in (q.shape[2], k.shape[2]):
        return flash_forward(q, k, v, causal, None)
    from transformer_engine.pytorch.cpp_extensions.fused_attn import (  # loads CUDA libraries
        FusedAttnBackend,
        fused_attn_fwd,
    )

    out, (lse_bhs1, *_) = fused_attn_fwd(
        True,  # training: return the log-sum-exp
        *_lengths(q, k),
        *(_gapless(t) for t in (q, k, v)),
        q.dtype,
        FusedAttnBackend["F16_arbitrary_seqlen"],
        rng_gen=torch.Generator(q.device),  # it draws without dropout too; not from PyTorch's own
        **_options(causal),
    )
    return out.transpose(1, 2), lse_bhs1.squeeze(3)


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if 1 in (q.shape[2], k.shape[2]):
        return flash_backward(grad_out, q, k, v, out, lse, causal, None)
    from transformer_engine.pytorch.constants import TE_DType  # loads CUDA libraries
    from transformer_engine.pytorch.cpp_extensions.fused_attn import (
        FusedAttnBackend,
        fused_attn_bwd,
    )

    no_dropout = torch.zeros(2, dtype=torch.int64, device=q.device)  # seed and offset
    dq, dk, dv, *_ = fused_attn_bwd(
        *_lengths(q, k),
        *(_gapless(t) for t in (q, k, v, out, grad_out)),
        q.dtype,
        TE_DType[q.dtype],
        [lse.contiguous().unsqueeze(3), no_dropout],
        FusedAttnBackend["F16_arbitrary_seqlen"],
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_options(causal),
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _options(causal: bool) -> dict[str, Any]:
    return {
        "qkv_layout": "bshd_bshd_bshd",
        "attn_mask_type": "causal" if causal else "no_mask",
    }


def _lengths(q: Tensor, k: Tensor) -> tuple[int, int, Tensor, Tensor]:
    """Return the lengths of q and k, and their cumulative lengths over the batch."""
    batch, s, t = q.shape[0], q.shape[2], k.shape[2]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    return s, t, starts * s, starts * t


def _gapless(t_bhsD: Tensor) -> Tensor:
    """Return the tensor as [b, s, h, D], contiguous."""
    return t_bhsD.transpose(1, 2).contiguous()


TRANSFORMER_ENGINE = AttentionKernel(
    "transformer_engine", _refusal, *by_document(_forward, _backward)
)
