# SPDX-License-Identifier: Apache-2.0
"""Attention within a window over zigzag shards, as an attention kernel over a group.

A token attends to at most W - 1 tokens before it, so a rank needs, besides its own, the keys and
values of the W - 1 tokens before each of its two chunks (chunks r and 2C - 1 - r of 2C on rank r):
its halo. Their owners send them directly; nothing goes round a ring. For W at most a chunk these
are the ranks r - 1 and r + 1, for a larger window those of more chunks.

    forward     attention of each chunk within its window, while the halo is in flight; then of its
                first tokens over the halo, merged by the log-sum-exp
    backward    the same parts, given the final out and lse; the gradients of a halo go back to its
                owner, which adds them to its own

Bytes sent by a rank: 2 (W - 1) tokens of K and of V, less what is its own, and backward of dK and
dV in the merge's dtype. Memory on top of `custom_modules.attention.window`: the halo once as it is
received and once as it is sent, in the backward its gradients.

With documents kept apart a halo is used by one document alone, the one that the chunk continues.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from custom_modules.attention.documents import Documents, Span, chunks_of
from custom_modules.attention.kernel import AttentionKernel
from custom_modules.attention.window import (
    Part,
    Run,
    attend_blocks,
    attend_parts,
    gradients_of_blocks,
    gradients_of_parts,
    parts_before,
    parts_of,
    windowed,
    without_blocks,
)
from custom_modules.context_parallel.p2p import Messages, post
from custom_modules.context_parallel.ring import ring_kernel
from custom_modules.dtypes import accumulation_dtype


def windowed_ring_kernel(
    kernel: AttentionKernel, group: dist.ProcessGroup, window: int
) -> AttentionKernel:
    """Return the kernel within a window over a group whose ranks hold zigzag shards.

    Its tensors are this rank's shards, [b, h, s, D]; `documents` covers the whole sequence.
    """
    alone = windowed(kernel, window)
    if dist.get_world_size(group) == 1:
        return alone
    halo = _Halo(kernel, group, window)
    name = f"a window of {window:,} over {halo.size} ranks of {kernel.name}"
    return AttentionKernel(name, kernel.refusal, halo.forward, halo.backward)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Tokens that one rank's chunk needs of an earlier chunk."""

    to_chunk: int
    from_chunk: int
    tokens: Span
    """Within the earlier chunk."""
    at: int
    """First of their places in the halo."""

    @property
    def in_halo(self) -> slice:
        """Their places in the halo."""
        return slice(self.at, self.at + self.tokens[1] - self.tokens[0])


def transfers(size: int, chunk: int, window: int) -> list[Transfer]:
    """Return what all chunks of a sequence need, in an order that all ranks know.

    There are 2 * `size` chunks of `chunk` tokens.
    """
    found = []
    for c in range(2 * size):
        start = c * chunk
        first = start - halo_length(c, chunk, window)
        for earlier in range(first // chunk, c):
            begin, end = max(first, earlier * chunk), (earlier + 1) * chunk
            if end > begin:
                tokens = (begin - earlier * chunk, end - earlier * chunk)
                found.append(Transfer(c, earlier, tokens, begin - first))
    return found


def halo_length(number: int, chunk: int, window: int) -> int:
    """Return how many tokens before a chunk its first token attends to."""
    return min(window - 1, number * chunk)


class _Halo:
    """The parts and messages of one rank."""

    def __init__(self, inner: AttentionKernel, group: dist.ProcessGroup, window: int) -> None:
        self.inner, self.group, self.window = inner, group, window
        self.ring = ring_kernel(inner, group)
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.chunks = chunks_of(self.rank, self.size)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Documents | None
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's out [b, h, s, D] and lse [b, h, s]."""
        if self.window >= q.shape[2] * self.size:
            return self.ring.forward(q, k, v, causal, documents)
        self._require(q, causal, documents)
        halos, messages = self._fetch(k, v)
        blocks = self._blocks(documents)
        out, lse = attend_blocks(self.inner, q, k, v, blocks)
        own = without_blocks(parts_of(self._runs(q, documents), self.window), blocks)
        attend_parts(self.inner, own, q, k, v, out, lse)
        messages.wait()
        for number, (keys, values) in zip(self.chunks, halos, strict=True):
            parts = self._before(number, q, documents)
            attend_parts(self.inner, parts, q, keys, values, out, lse)
        return out.to(q.dtype), lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, documents: Documents | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return this rank's dq, dk and dv; `out` and `lse` are those of the whole window."""
        if self.window >= q.shape[2] * self.size:
            return self.ring.backward(grad_out, q, k, v, out, lse, causal, documents)
        self._require(q, causal, documents)
        halos, messages = self._fetch(k, v)
        sum_in = accumulation_dtype(q.dtype)
        given = (grad_out, q, k, v, out, lse)
        blocks = self._blocks(documents)
        dq, dk, dv = gradients_of_blocks(self.inner, given, blocks)
        own = without_blocks(parts_of(self._runs(q, documents), self.window), blocks)
        gradients_of_parts(self.inner, own, given, (dq, dk, dv))
        messages.wait()
        of_halos = []
        for number, (keys, values) in zip(self.chunks, halos, strict=True):
            of_keys, of_values = (
                _bhsd(_empty(x, x.shape[2], sum_in).zero_()) for x in (keys, values)
            )
            gradients_of_parts(
                self.inner,
                self._before(number, q, documents),
                (grad_out, q, keys, values, out, lse),
                (dq, of_keys, of_values),
            )
            of_halos.append((of_keys, of_values))
        self._return(of_halos, dk, dv)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

    def _require(self, q: Tensor, causal: bool, documents: Documents | None) -> None:
        if not causal:
            raise ValueError(
                f"attention with a window of {self.window:,} is causal; whole attention has none"
            )
        if q.shape[2] % 2:
            raise ValueError(f"a zigzag shard is two chunks; {q.shape[2]} tokens are not")
        if documents is not None:
            documents.require(batch=q.shape[0], seq_length=q.shape[2] * self.size)

    def _blocks(self, documents: Documents | None) -> Documents | None:
        """Return the blocks of this rank's chunks as a table, for a kernel that takes them all."""
        if documents is None or not self.inner.packed:
            return None
        return documents.apart(self.rank, self.size).cut(self.window)

    def _runs(self, q: Tensor, documents: Documents | None) -> Iterator[Run]:
        chunk = q.shape[2] // 2
        for place, number in enumerate(self.chunks):
            if documents is None:
                yield slice(None), place * chunk, (place + 1) * chunk
                continue
            for row in range(documents.batch):
                for start, stop in documents.spans(row):
                    first = max(start, number * chunk) - number * chunk
                    end = min(stop, (number + 1) * chunk) - number * chunk
                    if first < end:
                        yield slice(row, row + 1), place * chunk + first, place * chunk + end

    def _before(self, number: int, q: Tensor, documents: Documents | None) -> Iterator[Part]:
        """Yield the parts of a chunk's queries over its halo."""
        chunk = q.shape[2] // 2
        place, halo = self.chunks.index(number) * chunk, halo_length(number, chunk, self.window)
        if documents is None:
            least = halo - self.window + 1
            for part in parts_before(slice(None), chunk, halo, least):
                yield part.moved(place, 0)
            return
        start = number * chunk
        for row in range(documents.batch):
            for first, end in documents.spans(row):
                if first < start < end:
                    keys = min(halo, start - first)
                    queries = min(end - start, chunk)
                    rows = slice(row, row + 1)
                    for part in parts_before(rows, queries, keys, keys - self.window + 1):
                        yield part.moved(place, halo - keys)

    def _fetch(self, k: Tensor, v: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Messages]:
        """Return the keys and values before each chunk, which arrive with the messages."""
        chunk = k.shape[2] // 2
        lengths = [halo_length(number, chunk, self.window) for number in self.chunks]
        halos = [tuple(_empty(x, length, x.dtype) for x in (k, v)) for length in lengths]
        sent, received = list[tuple[int, Tensor]](), list[tuple[int, Tensor]]()
        for one, giver, taker in self._transfers(chunk):
            for at, own in enumerate((k, v)):
                if giver == self.rank:
                    tail = _flat(own)[self._place(one, chunk)].contiguous()
                if taker == self.rank:
                    buffer = halos[self.chunks.index(one.to_chunk)][at][one.in_halo]
                    if giver == self.rank:
                        buffer.copy_(tail)
                    else:
                        received.append((giver, buffer))
                elif giver == self.rank:
                    sent.append((taker, tail))
        messages = post(sent, received, self.group)
        return [(_bhsd(keys), _bhsd(values)) for keys, values in halos], messages

    def _return(self, of_halos: list[tuple[Tensor, Tensor]], dk: Tensor, dv: Tensor) -> None:
        """Send the gradients of halos to their owners, and add those that come to `dk` and `dv`."""
        chunk = dk.shape[2] // 2
        sent, received = list[tuple[int, Tensor]](), list[tuple[int, Tensor]]()
        coming = list[tuple[Tensor, Tensor]]()
        for one, owner, holder in self._transfers(chunk):
            for at, total in enumerate((dk, dv)):
                if holder == self.rank:
                    grad = _flat(of_halos[self.chunks.index(one.to_chunk)][at])[one.in_halo]
                if owner == self.rank:
                    to = _flat(total)[self._place(one, chunk)]
                    if holder == self.rank:
                        to.add_(grad)
                        continue
                    buffer = torch.empty_like(to, memory_format=torch.contiguous_format)
                    received.append((holder, buffer))
                    coming.append((to, buffer))
                elif holder == self.rank:
                    sent.append((owner, grad.contiguous()))
        post(sent, received, self.group).wait()
        for to, grad in coming:
            to.add_(grad)

    def _transfers(self, chunk: int) -> Iterator[tuple[Transfer, int, int]]:
        """Yield each transfer with the ranks of its earlier and its later chunk."""
        owner = {number: rank for rank in range(self.size) for number in chunks_of(rank, self.size)}
        for one in transfers(self.size, chunk, self.window):
            yield one, owner[one.from_chunk], owner[one.to_chunk]

    def _place(self, one: Transfer, chunk: int) -> slice:
        """Return where the tokens of a transfer are in the shard of their owner, this rank."""
        first = self.chunks.index(one.from_chunk) * chunk
        return slice(first + one.tokens[0], first + one.tokens[1])


def _empty(like: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Return room for tokens [length, b, g, D], any of which are one message."""
    b, g, _, d = like.shape
    return like.new_empty((length, b, g, d), dtype=dtype)


def _flat(t: Tensor) -> Tensor:
    return t.permute(2, 0, 1, 3)


def _bhsd(t: Tensor) -> Tensor:
    return t.permute(1, 2, 0, 3)
