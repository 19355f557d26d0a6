# SPDX-License-Identifier: Apache-2.0
"""Exact attention over a sequence that ranks share: an all-to-all inside, a ring outside.

    q [s, b, h, D], k, v [s, b, g, D] on each rank  ->  [s, b, h, D]

`attend` combines three independent parts: an attention kernel
(`custom_modules.attention.registry`), the ring that turns it into a kernel over the keys of a group
(`custom_modules.context_parallel.ring`; `halo` within a window), and the all-to-all around either
(`custom_modules.context_parallel.ulysses`). With both groups it is the 2-D hybrid of USP (arXiv
2405.07719).

Groups: of CP ranks, `u` neighbours exchange heads; ranks at the same place in their neighbourhood
form a ring. Zigzag sharding over CP ranks is, after the inner exchange, zigzag sharding over the
ring: neighbours g*u .. g*u+u-1 hold 2u chunks that join to the ring's chunks g and 2c-1-g.

Saved for backward: q, k, v, out and the log-sum-exp that the kernel saw, so with the all-to-all
those of the rank's head share over the inner group's sequence. In a layer that keeps attention
(`custom_modules.memory.recompute`), out and the log-sum-exp come from there when it is rebuilt.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from custom_modules.attention.documents import Documents
from custom_modules.attention.kernel import AttentionKernel
from custom_modules.attention.registry import require_alike
from custom_modules.attention.window import windowed
from custom_modules.context_parallel.halo import windowed_ring_kernel
from custom_modules.context_parallel.ring import ring_kernel
from custom_modules.context_parallel.ulysses import require_heads, to_heads, to_tokens
from custom_modules.memory.recompute import on_attention_backward_done, reuse_saved_attention


@dataclass(frozen=True, slots=True)
class Groups:
    """The two groups of a rank; None for a group of the rank alone."""

    ulysses: dist.ProcessGroup | None
    ring: dist.ProcessGroup | None

    def kernel(self, inner: AttentionKernel, window: int | None = None) -> AttentionKernel:
        """Return the kernel over all keys of the ring, or over those within a window."""
        if window is None:
            return inner if self.ring is None else ring_kernel(inner, self.ring)
        if self.ring is None:
            return windowed(inner, window)
        return windowed_ring_kernel(inner, self.ring, window)

    @property
    def ring_size(self) -> int:
        """Ranks of the ring."""
        return 1 if self.ring is None else dist.get_world_size(self.ring)

    @property
    def ulysses_size(self) -> int:
        """Ranks of the all-to-all."""
        return 1 if self.ulysses is None else dist.get_world_size(self.ulysses)


_made: WeakKeyDictionary[dist.ProcessGroup, dict[int, Groups]] = WeakKeyDictionary()
"""Groups by parent group: all layers share them, and they live as long as the parent."""


def split_group(group: dist.ProcessGroup, ulysses: int) -> Groups:
    """Return the inner group of `ulysses` neighbours and the ring of this rank.

    Every rank of `group` must call it. The subgroups of a group are created once.
    """
    size = dist.get_world_size(group)
    if size % ulysses:
        raise ValueError(f"ulysses {ulysses} does not divide the {size} ranks of the group")
    if ulysses == 1 or ulysses == size:
        one = None if size == 1 else group
        return Groups(one, None) if ulysses > 1 else Groups(None, one)
    made_of = _made.setdefault(group, {})
    if ulysses not in made_of:
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
        first = rank // ulysses * ulysses
        timeout = group._get_backend(_device_of(group)).options._timeout
        made = [
            dist.new_group(members, timeout=timeout, use_local_synchronization=True)
            for members in (ranks[first : first + ulysses], ranks[rank % ulysses :: ulysses])
        ]
        made_of[ulysses] = Groups(*made)
    return made_of[ulysses]


def _device_of(group: dist.ProcessGroup) -> torch.device:
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


class _Attend(torch.autograd.Function):
    """Attention by a kernel pair; saves q, k, v, out and the log-sum-exp that the kernel saw."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionKernel, causal: bool,
        documents: Documents | None,
    ) -> Tensor:  # fmt: skip
        ctx.kernel, ctx.causal, ctx.documents = kernel, causal, documents
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        out, lse = reuse_saved_attention(lambda: kernel.forward(q, k, v, causal, documents))
        ctx.ended = on_attention_backward_done()
        ctx.save_for_backward(q, k, v, out, lse)
        return out.permute(2, 0, 1, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):  # type: ignore[no-untyped-def]
        grads = ctx.kernel.backward(
            grad_out.permute(1, 2, 0, 3), *ctx.saved_tensors, ctx.causal, ctx.documents
        )
        ctx.ended()
        return *(grad.permute(2, 0, 1, 3) for grad in grads), None, None, None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel: AttentionKernel,
    groups: Groups,
    causal: bool,
    documents: Documents | None = None,
    window: int | None = None,
) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v, [s, b, h, D], of zigzag shards over all ranks of `groups`.

    Takes q [s, b, h, D] and k, v [s, b, g, D] of one dtype. `documents` is the table of the whole
    sequence: tokens then attend only within their document. With a `window` a token attends to that
    many tokens, itself included; attention is then causal. Raises ValueError for mixed dtypes and
    shapes, heads that do not fit, and a table that does not add up to the sequence.
    """
    require_alike(q, k, v)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    if documents is not None:
        ranks = groups.ring_size * groups.ulysses_size
        documents.require(batch=q.shape[1], seq_length=q.shape[0] * ranks)
    over_ring = groups.kernel(kernel, window)
    if groups.ulysses is None:
        return _Attend.apply(q, k, v, over_ring, causal, documents)
    heads = q.shape[2]
    require_heads(heads, k.shape[2], groups.ulysses_size)
    q, k, v = (to_heads(t, groups.ulysses) for t in (q, k, v))
    return to_tokens(
        _Attend.apply(q, k, v, over_ring, causal, documents), groups.ulysses, heads=heads
    )
