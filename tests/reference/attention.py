# SPDX-License-Identifier: Apache-2.0
"""Attention as the formula says it, one head at a time, every score in memory."""

import math

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return out [b, h, s, D] and log-sum-exp [b, h, s] for q [b, h, s, D], k and v [b, g, s, D].

    Query heads share KV heads in runs of h / g neighbours, as in Llama.
    """
    heads, kv_heads, length = q.shape[1], k.shape[1], q.shape[2]
    outs, sums = [], []
    for head in range(heads):
        kv = head * kv_heads // heads
        scores = q[:, head] @ k[:, kv].transpose(1, 2) / math.sqrt(q.shape[3])
        if causal:
            for row in range(length):
                scores[:, row, row + 1 :] = -math.inf
        outs.append(torch.softmax(scores, dim=-1) @ v[:, kv])
        sums.append(torch.logsumexp(scores, dim=-1))
    return torch.stack(outs, dim=1), torch.stack(sums, dim=1)


def attention_with_gradients(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out and the gradients of q, k and v, all float64."""
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, _ = attention(*leaves, causal=causal)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out.double())
