# SPDX-License-Identifier: Apache-2.0
"""All-to-all context parallelism under zigzag sharding ("Ulysses", arXiv 2309.14509).

    q, k, v [s, b, h, D] on each of C ranks  ->  attention over S = C * s tokens  ->  [s, b, h, D]

Megatron cuts the sequence into 2C chunks and gives rank r the chunks r and 2C - 1 - r, so that
causal work is even for ring attention. Ulysses does not need the balance (every rank sees the
whole sequence for its share of the heads), but it must undo the order:

1. all-to-all: rank r sends head group j of its tokens to rank j, and receives all tokens of head
   group r, [C, s, b, h/C, D];
2. `zigzag_to_natural` puts the 2C chunks in order, [S, b, h/C, D];
3. attention, by any kernel pair, over whole sequences;
4. the same two steps backwards.

Bytes sent by a rank, forward: (C-1)/C * s * b * D * (2 * heads + 2 * KV heads) * element size.
Composes with tensor parallelism (h is then the heads of this TP rank), PP and recompute.
Limits: heads and KV heads on a TP rank must be divisible by C.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def zigzag_to_natural(t: Tensor) -> Tensor:
    """Return the tokens in order; `t` [C, s, ...] holds each rank's two chunks in rank order."""
    chunks = t.unflatten(1, (2, -1))
    first = chunks[:, 0]
    last = chunks[:, 1].flip(0)
    return torch.cat((first, last)).flatten(0, 1)


def natural_to_zigzag(t: Tensor, size: int) -> Tensor:
    """Undo `zigzag_to_natural`: `t` [S, ...] becomes [C, s, ...]."""
    chunks = t.unflatten(0, (2 * size, -1))
    return torch.stack((chunks[:size], chunks[size:].flip(0)), dim=1).flatten(1, 2)


class _AllToAll(torch.autograd.Function):
    """Exchange equal blocks along dimension 0; its gradient is the same exchange."""

    @staticmethod
    def forward(ctx, t: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.group = group
        return _exchange(t, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return _exchange(grad, ctx.group), None


def _exchange(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    t = t.contiguous()  # the collective reads flat blocks
    received = torch.empty_like(t)
    dist.all_to_all_single(received, t, group=group)
    return received


def gather_sequence(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Turn a zigzag shard of the sequence, [s, b, h, D], into a shard of heads, [S, b, h/C, D]."""
    size = dist.get_world_size(group)
    by_rank = t.unflatten(2, (size, -1)).movedim(2, 0)
    return zigzag_to_natural(_AllToAll.apply(by_rank, group))


def scatter_sequence(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Turn a shard of the heads back into a zigzag shard: [S, b, h/C, D] -> [s, b, h, D]."""
    size = dist.get_world_size(group)
    by_head = _AllToAll.apply(natural_to_zigzag(t, size), group)
    return by_head.movedim(0, 2).flatten(2, 3)
