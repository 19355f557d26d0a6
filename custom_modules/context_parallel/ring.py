# SPDX-License-Identifier: Apache-2.0
"""Ring attention under zigzag sharding (arXiv 2310.01889), as an attention kernel over a group.

    out = sum_j exp(lse_j - lse) * out_j,    lse = log sum_j exp(lse_j)

where (out_j, lse_j) is the attention of this rank's queries over the keys of rank j alone. Keys
and values travel around the ring of C ranks; no rank ever holds the full K and V. With zigzag
sharding (chunks r and 2C - 1 - r of 2C on rank r) causal work is the same on every rank and step:

* step 0, the rank's own keys: its two chunks joined, causal;
* keys of an earlier rank, j < r: all queries attend to the first chunk of j, whole;
* keys of a later rank, j > r: the second chunk's queries attend to both chunks of j, whole.

While a step computes, the keys of the next are in flight. The merge is in fp32 (float64 for
float64): each rank rescales its output by the growth of its log-sum-exp.

The backward runs the same ring. Given the final out and lse, each step's gradients are exactly
this part's share (`custom_modules.attention.kernel`); dq stays, dk and dv travel one step behind
their keys, summed in fp32, and reach their own rank after a whole turn.

With documents kept apart step 0 is a packed call and every other pair of chunks shares at most one
document (`custom_modules.attention.documents`), so a step is at most four rectangles a sequence.

Memory on top of inputs (h + 2g) and, in the backward, out, grad_out and the log-sum-exp, in slices
e = s * b * D elements; a is the bytes of the merge over the model's (1 for fp32, 2 for bf16):

    forward   a h + 2g min(C-1, 2) + p h (a > 1: p h (1 + a))
    backward  a h + 2g min(C-1, 2) + 4g a + max(h + g, h/2 + 2g)

(and log-sum-exps, 1 + 3p of b * s * h numbers): the output; keys and values of two other ranks, one
where C is 2; a step's output over the share p of the queries, 1 but for the first rank's 1/2 where
causal. Backward: dq, keys and values, two sets of dk and dv, and the step's own.

Bytes sent by a rank: forward (C-1)/C of the bytes of full K plus full V; backward the same, and
C times its own dK and dV in the merge's dtype.

`ring_kernel` is itself an attention kernel, so Ulysses, head-chunked Ulysses and kept-attention
recompute take it where they take a plain one. Any number of heads; C of one returns the kernel.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from custom_modules.attention.documents import Documents, chunks_of
from custom_modules.attention.kernel import AttentionKernel
from custom_modules.context_parallel.p2p import Messages, post
from custom_modules.dtypes import accumulation_dtype

Block = tuple[slice, slice, slice]
"""Sequences, queries and keys of one rectangle of attention that is not masked inside."""


def ring_kernel(kernel: AttentionKernel, group: dist.ProcessGroup) -> AttentionKernel:
    """Return the kernel over all keys of a group whose ranks hold zigzag shards.

    Its tensors are this rank's shards, [b, h, s, D]; `documents` covers the whole sequence.
    """
    if dist.get_world_size(group) == 1:
        return kernel
    return _Ring(kernel, group).kernel()


class _Ring:
    """The steps of one rank."""

    def __init__(self, kernel: AttentionKernel, group: dist.ProcessGroup) -> None:
        self.inner, self.group = kernel, group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def kernel(self) -> AttentionKernel:
        return AttentionKernel(
            f"ring of {self.size} over {self.inner.name}",
            self.inner.refusal,
            self.forward,
            self.backward,
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Documents | None
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's out [b, h, s, D] and lse [b, h, s]."""
        local = self._local(q, documents)
        for step, (keys, values) in enumerate(self._circulating(k, v)):
            if step == 0:
                own, lse = self.inner.forward(q, keys, values, causal, local)
                out = own.to(lse.dtype)
                del own
                continue
            for rows, queries, span in self._blocks(step, q, causal, documents):
                at, of = (rows, slice(None), queries), (rows, slice(None), span)
                part, part_lse = self.inner.forward(q[at], keys[of], values[of], False, None)
                _merge(out[at], lse[at], part, part_lse)
                del part
        return out.to(q.dtype), lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, documents: Documents | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return this rank's dq, dk and dv; `out` and `lse` are those of the whole ring."""
        local, sum_in = self._local(q, documents), accumulation_dtype(q.dtype)
        travelling = Messages([], [])
        for step, (keys, values) in enumerate(self._circulating(k, v)):
            if step == 0:
                own = self.inner.backward(grad_out, q, keys, values, out, lse, causal, local)
                dq = own[0].to(sum_in)
                sums = [_flat(grad.to(sum_in)) for grad in own[1:]]
                coming = [torch.empty_like(grad) for grad in sums]
                del own
            else:
                parts: list[tuple[Any, tuple[Tensor, ...]]] = []
                for rows, queries, span in self._blocks(step, q, causal, documents):
                    at, of = (rows, slice(None), queries), (rows, slice(None), span)
                    part, *of_keys = self.inner.backward(
                        grad_out[at], q[at], keys[of], values[of], out[at], lse[at], False, None
                    )
                    dq[at] += part
                    parts.append((of, tuple(of_keys)))
                    del part, of_keys
                travelling.wait()
                sums, coming = coming, sums
                _add(parts, sums)
                parts.clear()  # no tensor of a step outlives it
            travelling = self._pass_on(sums, coming)
        travelling.wait()
        dk, dv = (_bhsd(grad).to(q.dtype) for grad in coming)
        return dq.to(q.dtype), dk, dv

    def _circulating(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        """Yield the tensors of each rank, this one's first, while the next are in flight."""
        held = [_flat(t) for t in tensors]
        free: list[list[Tensor]] = []
        for step in range(self.size):
            if step == self.size - 1:
                yield [_bhsd(t) for t in held]
                return
            coming = free.pop() if free else [torch.empty_like(t) for t in held]
            messages = self._pass_on(held, coming)
            yield [_bhsd(t) for t in held]
            messages.wait()
            if step > 0:
                free.append(held)
            held = coming

    def _pass_on(self, sent: list[Tensor], received: list[Tensor]) -> Messages:
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return post([(after, t) for t in sent], [(before, t) for t in received], self.group)

    def _local(self, q: Tensor, documents: Documents | None) -> Documents | None:
        """Return the documents of this rank's chunks; ValueError if the table does not fit."""
        if q.shape[2] % 2:
            raise ValueError(f"a zigzag shard is two chunks; {q.shape[2]} tokens are not")
        if documents is None:
            return None
        documents.require(batch=q.shape[0], seq_length=q.shape[2] * self.size)
        return documents.shard(self.rank, self.size)

    def _blocks(
        self, step: int, q: Tensor, causal: bool, documents: Documents | None
    ) -> Iterator[Block]:
        """Yield the rectangles of this rank's queries and the keys of a later step."""
        other = (self.rank - step) % self.size
        chunk = q.shape[2] // 2
        every, first, second = slice(None), slice(0, chunk), slice(chunk, None)
        if documents is None:
            if not causal:
                yield every, every, every
            elif other < self.rank:
                yield every, every, first
            else:
                yield every, second, every
            return
        for row in range(q.shape[0]):
            for at, q_chunk in enumerate(chunks_of(self.rank, self.size)):
                for of, k_chunk in enumerate(chunks_of(other, self.size)):
                    if causal and k_chunk > q_chunk:
                        continue
                    spans = documents.shared(row, q_chunk, k_chunk, self.size)
                    if spans is not None:
                        queries, keys = spans
                        yield (
                            slice(row, row + 1),
                            slice(at * chunk + queries[0], at * chunk + queries[1]),
                            slice(of * chunk + keys[0], of * chunk + keys[1]),
                        )


def _add(parts: list[tuple[Any, tuple[Tensor, ...]]], sums: list[Tensor]) -> None:
    """Add the gradients of some keys and values to the sums of all."""
    for of, of_keys in parts:
        for total, part in zip(sums, of_keys, strict=True):
            _bhsd(total)[of] += part


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add the attention over more keys to `out` and `lse`, in their dtype, in place."""
    weight = torch.sigmoid(part_lse - lse)  # exp(part_lse) / (exp(lse) + exp(part_lse))
    out.lerp_(part.to(out.dtype), weight[..., None])
    lse.copy_(torch.logaddexp(lse, part_lse))


def _flat(t: Tensor) -> Tensor:
    """Return `t` [b, h, s, D] as one message, [s, b, h, D]: a view if it has this layout."""
    return t.permute(2, 0, 1, 3).contiguous()


def _bhsd(t: Tensor) -> Tensor:
    return t.permute(1, 2, 0, 3)
