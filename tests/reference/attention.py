# SPDX-License-Identifier: Apache-2.0
"""Attention as the formula says it, one head at a time, every score in memory."""

import math

import torch
from torch import Tensor

Lengths = list[list[int]]
"""Of the documents of each sequence, in order."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    documents: Lengths | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [b, h, s, D] and log-sum-exp [b, h, s] for q [b, h, s, D], k and v [b, g, s, D].

    With a window, a query attends to that many tokens, itself included.
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
        if window is not None:
            for row in range(window, length):
                scores[:, row, : row - window + 1] = -math.inf
        if documents is not None:
            scores = scores.masked_fill(apart(documents), -math.inf)
        outs.append(torch.softmax(scores, dim=-1) @ v[:, kv])
        sums.append(torch.logsumexp(scores, dim=-1))
    return torch.stack(outs, dim=1), torch.stack(sums, dim=1)


def apart(documents: Lengths) -> Tensor:
    """Return a mask [b, s, s], true where a query and a key lie in different documents."""
    ids = torch.tensor(
        [[index for index, length in enumerate(row) for _ in range(length)] for row in documents]
    )
    return ids[:, :, None] != ids[:, None, :]


def attention_with_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    *,
    causal: bool,
    documents: Lengths | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out and the gradients of q, k and v, all float64."""
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, _ = attention(*leaves, causal=causal, documents=documents, window=window)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out.double())
