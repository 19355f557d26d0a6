# SPDX-License-Identifier: Apache-2.0
"""All-to-all context parallelism under zigzag sharding ("Ulysses", arXiv 2309.14509).

    q, k, v [s, b, h, D] on each of C ranks  ->  attention over S = C * s tokens  ->  [s, b, h, D]

Megatron cuts the sequence into 2C chunks and gives rank r the chunks r and 2C - 1 - r, so that
causal work is even for ring attention. Ulysses does not need the balance (every rank sees the
whole sequence for its share of the heads), but it must undo the order. Each rank

1. sends head share j of its two chunks to rank j, which receives them at their place in the
   natural order, [S, b, h/C, D]: the exchange undoes the order, without a copy;
2. attends over whole sequences of its heads, by any attention kernel;
3. sends the output of each two chunks back to the rank that holds them, [s, b, h, D].

The backward is the same three steps with gradients. With g < C KV heads each of them goes to the
C/g ranks whose query heads need it, and their gradients come back as a sum.

Memory, in head slices e = s * b * D elements, with G = max(g, C), inputs and output counted:

    forward   (h + 2g) + (h + 2G) + 2h + (C-1)/C * h
    backward  2h + (h + 2G) + 2h + (h + 2G)

and the log-sum-exp. Forward: the inputs, exchanged q, k and v, the output before and after its
return, and its messages. (Messages are views of it if b is 1; for b > 1 they are packed, which
takes the same again.) Backward: the output and its gradient, the exchanged q, k, v, output and its
gradient, and the kernel's results; the exchanges are autograd nodes apart from the kernel, so its
saved tensors are freed before gradients are sent back. `custom_modules.context_parallel.cost` has
the formulas as code.

Bytes sent by a rank, forward: (C-1)/C * (2h + 2G) * e * element size; backward the same.

Composes with tensor parallelism (h is then the heads of this TP rank), PP and recompute. Around a
ring (`custom_modules.context_parallel.ring`) as its kernel it is the 2-D hybrid: C is then the
inner degree, S the tokens of the inner group, and neighbouring ranks hold a zigzag shard of the
outer ring together. Limits: C divides h, and g or else g divides C.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from custom_modules.attention.documents import chunks_of
from custom_modules.context_parallel.config import fits_ulysses, ulysses_sizes
from custom_modules.context_parallel.p2p import Messages, post
from custom_modules.dtypes import accumulation_dtype


class Gathering:
    """Heads on their way to the ranks that attend with them (`start_gather`)."""

    def __init__(self, gathered: list[Tensor], messages: Messages) -> None:
        """Take the results, and the messages that fill them."""
        self._gathered, self._messages = gathered, messages

    def wait(self) -> list[Tensor]:
        """Return the results, [S, b, n, D], when they are complete, and keep none of them."""
        self._messages.wait()
        gathered, self._gathered = self._gathered, []
        return gathered


def start_gather(tensors: Sequence[Sequence[Tensor]], group: dist.ProcessGroup) -> Gathering:
    """Start `gather_shares` of several tensors, in one batch of messages."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    peers = [peer for peer in range(size) if peer != rank]
    gathered: list[Tensor] = []
    sent: list[tuple[int, Tensor]] = []
    received: list[tuple[int, Tensor]] = []
    for shares in tensors:
        s, b, *heads, head_dim = shares[0].shape
        if s % 2:
            raise ValueError(f"a zigzag shard is two chunks; {s} tokens are not")
        gathered.append(shares[0].new_empty(size * s, b, math.prod(heads), head_dim))
        chunks = gathered[-1].unflatten(0, (2 * size, -1))
        distinct = {id(shares[peer]): shares[peer] for peer in peers}
        packed = {key: share.contiguous() for key, share in distinct.items()}
        sent += [(peer, half) for peer in peers for half in _halves(packed[id(shares[peer])])]
        received += [(peer, chunks[index]) for peer in peers for index in chunks_of(peer, size)]
    messages = post(sent, received, group)
    for shares, whole in zip(tensors, gathered, strict=True):
        chunks = whole.unflatten(0, (2 * size, -1))
        for index, half in zip(chunks_of(rank, size), _halves(shares[rank]), strict=True):
            chunks[index].unflatten(2, half.shape[2:-1]).copy_(half)
    return Gathering(gathered, messages)


def gather_shares(shares: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Send share j of the heads, [s, b, ..., D], to rank j; return this rank's, [S, b, n, D].

    The shares have the same shape, with n heads in one dimension or more, and may be views; the
    same tensor may go to several ranks. The zigzag shards of the sequence come back in the natural
    order. Raises ValueError for an odd shard.
    """
    return start_gather([shares], group).wait()[0]


class Scattering:
    """Results of several tensors on their way to the ranks of their tokens (`start_scatter`)."""

    def __init__(
        self, tensors: Sequence[Tensor], blocks: list[dict[int, Tensor]], messages: Messages,
        group: dist.ProcessGroup,
    ) -> None:  # fmt: skip
        """Take the tensors, what comes from each rank, and the messages that bring it."""
        self._tensors, self._blocks, self._messages = list(tensors), blocks, messages
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)

    def finish(self, shares: Sequence[Sequence[Tensor]]) -> None:
        """Write part j of each tensor to share j of its list, as `scatter_shares` does."""
        self._messages.wait()
        for t, blocks, targets in zip(self._tensors, self._blocks, shares, strict=True):
            chunks = t.unflatten(0, (2 * self._size, -1))
            for peer, share in enumerate(targets):
                halves = (
                    [chunks[index] for index in chunks_of(peer, self._size)]
                    if peer == self._rank
                    else _halves(blocks[peer])
                )
                sums = peer > 0 and share is targets[peer - 1]
                for target, half in zip(_halves(share), halves, strict=True):
                    if sums:
                        target.add_(half.view_as(target))
                    else:
                        target.copy_(half.unflatten(2, target.shape[2:-1]))
        self._tensors.clear()
        self._blocks.clear()


def start_scatter(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Scattering:
    """Start `scatter_shares` of several tensors, in one batch of messages."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    peers = [peer for peer in range(size) if peer != rank]
    all_blocks: list[dict[int, Tensor]] = []
    sent: list[tuple[int, Tensor]] = []
    received: list[tuple[int, Tensor]] = []
    for t in tensors:
        chunks = t.unflatten(0, (2 * size, -1))
        blocks = {peer: t.new_empty(t.shape[0] // size, *t.shape[1:]) for peer in peers}
        sent += [
            (peer, chunks[index].contiguous()) for peer in peers for index in chunks_of(peer, size)
        ]
        received += [(peer, half) for peer in peers for half in _halves(blocks[peer])]
        all_blocks.append(blocks)
    return Scattering(tensors, all_blocks, post(sent, received, group), group)


def scatter_shares(t: Tensor, shares: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Undo `gather_shares`: write `t` [S, b, n, D] of rank j to `shares[j]` [s, b, ..., D].

    The shares may be views. If neighbouring ranks have the same one, it gets their sum.
    """
    start_scatter([t], group).finish([shares])


def _halves(t: Tensor) -> tuple[Tensor, ...]:
    """Return the two chunks of a zigzag shard."""
    return t.tensor_split(2)


def split_heads(t: Tensor, size: int) -> list[Tensor]:
    """Return the heads of `t` [s, b, h, D] that each of `size` ranks attends with, as views.

    With fewer heads than ranks, neighbouring ranks get the same tensor. Raises ValueError if
    neither number divides the other.
    """
    heads = t.shape[2]
    if heads % size and size % heads:
        raise ValueError(
            f"{heads} heads cannot be spread over {size} all-to-all ranks: one must divide the "
            "other; a ring takes any number of heads"
        )
    parts = t.tensor_split(min(heads, size), dim=2)
    return [parts[rank * len(parts) // size] for rank in range(size)]


def gather_sequence(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Turn a zigzag shard of the sequence, [s, b, h, D], into whole sequences of a head share.

    Returns [S, b, max(h/C, 1), D] in the natural order.
    """
    return gather_shares(split_heads(t, dist.get_world_size(group)), group)


def scatter_sequence(
    t: Tensor, group: dist.ProcessGroup, *, heads: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Turn whole sequences of a head share back into the shard, [s, b, heads, D].

    If a head was sent to several ranks, the shard is the sum of their results, added in fp32
    (float64 for float64). The shard is in `dtype`, that of `t` if not given.
    """
    size, dtype = dist.get_world_size(group), dtype or t.dtype
    t = t.to(accumulation_dtype(dtype) if heads < size else dtype)
    shard = t.new_empty(t.shape[0] // size, t.shape[1], heads, t.shape[3])
    scatter_shares(t, split_heads(shard, size), group)
    return shard.to(dtype)


class _GatherSequence(torch.autograd.Function):
    """Saves nothing: the gradient is scattered back, that of a shared head as a sum."""

    @staticmethod
    def forward(ctx, t: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.group, ctx.heads = group, t.shape[2]
        return gather_sequence(t, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return scatter_sequence(grad, ctx.group, heads=ctx.heads), None


class _ScatterSequence(torch.autograd.Function):
    """Saves nothing: the gradient is gathered as the heads were."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, t: Tensor, group: dist.ProcessGroup, heads: int
    ) -> Tensor:
        ctx.group = group
        return scatter_sequence(t, group, heads=heads)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        return gather_sequence(grad, ctx.group), None, None


def to_heads(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `gather_sequence`, with a gradient."""
    return _GatherSequence.apply(t, group)


def to_tokens(t: Tensor, group: dist.ProcessGroup, *, heads: int) -> Tensor:
    """Return `scatter_sequence` of heads that were not shared, with a gradient."""
    return _ScatterSequence.apply(t, group, heads)


def require_heads(heads: int, kv_heads: int, size: int) -> None:
    """Raise ValueError if `size` all-to-all ranks cannot share the heads."""
    if not fits_ulysses(heads, kv_heads, size):
        possible = ", ".join(map(str, ulysses_sizes(heads, kv_heads)))
        raise ValueError(
            f"{heads} heads and {kv_heads} KV heads cannot be spread over {size} all-to-all "
            f"ranks; {possible} would fit, and a ring of any size"
        )
