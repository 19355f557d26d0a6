# SPDX-License-Identifier: Apache-2.0
"""Attention by the formula as a kernel pair, for any device and dtype: CUDA has none in float64."""

import torch
from torch import Tensor

from custom_modules.attention import registry
from custom_modules.attention.kernel import AttentionKernel, by_document
from custom_modules.dtypes import accumulation_dtype


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Return [b, g, h / g, s, t], each KV head before the query heads that share it."""
    scores = _by_kv_head(q, k) @ k[:, :, None].transpose(-1, -2) / q.shape[-1] ** 0.5
    if not causal:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf)


def _by_kv_head(t: Tensor, k: Tensor) -> Tensor:
    return t.unflatten(1, (k.shape[1], -1))


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    wide = [t.to(accumulation_dtype(q.dtype)) for t in (q, k, v)]
    scores = _scores(*wide[:2], causal)
    out = torch.softmax(scores, -1) @ wide[2][:, :, None]
    return out.flatten(1, 2).to(q.dtype), torch.logsumexp(scores, -1).flatten(1, 2)


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = q.dtype
    grad_out, q, k, v, out = (t.to(lse.dtype) for t in (grad_out, q, k, v, out))
    weights = torch.exp(_scores(q, k, causal) - _by_kv_head(lse, k)[..., None])
    queries, grads = _by_kv_head(q, k), _by_kv_head(grad_out, k)
    delta = _by_kv_head((grad_out * out).sum(-1), k)[..., None]
    of_scores = weights * (grads @ v[:, :, None].transpose(-1, -2) - delta) / q.shape[-1] ** 0.5
    dq = (of_scores @ k[:, :, None]).flatten(1, 2)
    dk = (of_scores.transpose(-1, -2) @ queries).sum(2)
    dv = (weights.transpose(-1, -2) @ grads).sum(2)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


PLAIN = AttentionKernel("plain", lambda *_: None, *by_document(_forward, _backward))


def register() -> None:
    """Let models take this kernel in this process, before all others."""
    registry.KERNELS = {PLAIN.name: PLAIN, **registry.KERNELS}


def kernel() -> AttentionKernel:
    """Return the kernel of the parity tests: this one where it is registered, else the CPU's."""
    return registry.KERNELS.get(PLAIN.name, registry.CPU_FLASH)
