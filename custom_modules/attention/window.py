# SPDX-License-Identifier: Apache-2.0
"""Attention within a window of W tokens, from kernels that know whole and causal attention alone.

    mask[i, j] = i - W < j <= i           (and document(i) == document(j))

A sequence is cut into blocks of W tokens, from the beginning of each document. A token attends to
its own block, causally, and to the part of the block before that is still within its window: of
tokens i and j of two neighbouring blocks, both counted from the beginning of their block, i attends
to j where j > i. With the order of both turned round this is causal attention again. So a band is
some rectangles, each in one of three ways:

    causal      query i of a square attends to keys j <= i
    backward    query i of a square attends to keys j >= i
    whole       every query attends to every key

and these are merged by their log-sum-exp, as in ring attention. Blocks of one length are a batch
of one call. The work is W S - W^2 / 2 pairs of a query and a key of S tokens, those of the mask.

Memory on top of inputs and outputs: the output in fp32 (float64 for float64), in the backward dq,
dk and dv in fp32. While a part is computed, what the kernel returns of it; of a `backward` part,
turned round, a copy of all that the kernel takes, and in the backward of what it returns. All
blocks of a sequence are one part, so these are as long as the sequence.

`windowed` is itself an attention kernel, so Ulysses and head-chunked Ulysses take it where they
take a plain one; `custom_modules.context_parallel.halo` is its form over a ring's shards.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from custom_modules.attention.documents import Documents, Span
from custom_modules.attention.kernel import AttentionKernel
from custom_modules.dtypes import accumulation_dtype

Way = Literal["causal", "backward", "whole"]
Run = tuple[slice, int, int]
"""Sequences, and the first and the end of tokens that follow one another in one document."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rectangles of queries and keys that are `step` tokens apart in both."""

    rows: slice
    """Sequences."""
    queries: Span
    """Of the first rectangle."""
    keys: Span
    way: Way
    count: int = 1
    step: int = 0

    def moved(self, queries: int, keys: int) -> "Part":
        """Return the part with its queries and keys so many tokens later."""
        (a, b), (c, d) = self.queries, self.keys
        return Part(
            self.rows, (a + queries, b + queries), (c + keys, d + keys), self.way, self.count,
            self.step,
        )  # fmt: skip


def windowed(inner: AttentionKernel, window: int) -> AttentionKernel:
    """Return the kernel in which a token attends to `window` tokens, itself included.

    Its tensors are whole sequences, [b, h, s, D], in order. Raises ValueError for a window below 1
    and for attention that is not causal.
    """
    if window < 1:
        raise ValueError(f"the window of attention is {window} tokens; it is at least 1")
    kernel = _Windowed(inner, window)
    return AttentionKernel(
        f"a window of {window:,} over {inner.name}",
        inner.refusal,
        kernel.forward,
        kernel.backward,
        inner.packed,
    )


def parts_of(runs: Iterable[Run], window: int) -> Iterator[Part]:
    """Yield the parts of causal attention within runs of tokens: all causal ones of a run first.

    The causal parts of a run cover each of its tokens once.
    """
    for rows, start, stop in runs:
        full, rest = divmod(stop - start, window)
        if full:
            yield Part(rows, (start, start + window), (start, start + window), "causal", full,
                       window)  # fmt: skip
        if rest:
            last = (start + full * window, stop)
            yield Part(rows, last, last, "causal")
        if full > 1:
            for part in parts_before(rows, window, window, 1):
                whole = part.moved(start + window, start)
                yield Part(rows, whole.queries, whole.keys, whole.way, full - 1, window)
        if full and rest:
            for part in parts_before(rows, rest, window, 1):
                yield part.moved(start + full * window, start + (full - 1) * window)


def parts_before(rows: slice, queries: int, keys: int, least: int) -> Iterator[Part]:
    """Yield the parts of so many queries over earlier keys: i attends to j >= i + `least`."""
    # The query after these attends to every key too: as the first of a triangle.
    whole = min(queries, max(0, -least))
    if whole and keys:
        yield Part(rows, (0, whole), (0, keys), "whole")
    stop = min(queries, keys - least)  # the others attend to none
    if stop <= whole or not keys:
        return
    first, end = whole + least, stop + least
    yield Part(rows, (whole, stop), (first, end), "backward")
    if end < keys:
        yield Part(rows, (whole, stop), (end, keys), "whole")


def runs_of(q: Tensor, documents: Documents | None) -> Iterator[Run]:
    """Yield the documents of whole sequences q [b, h, s, D], or the sequences."""
    if documents is None:
        yield slice(None), 0, q.shape[2]
        return
    for row in range(documents.batch):
        for start, stop in documents.spans(row):
            yield slice(row, row + 1), start, stop


def attend_parts(
    inner: AttentionKernel,
    parts: Iterable[Part],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Add the attention of parts to `out` [b, h, s, D] and `lse` [b, h, s], in place.

    A causal part is the first of its queries and is written over what is there.
    """
    for part in parts:  # each in a call of its own: no tensor of a part outlives it
        _attend(inner, part, q, k, v, out, lse)


def _attend(
    inner: AttentionKernel, part: Part, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> None:
    at, of = _at(part, "queries"), _at(part, "keys")
    queries, keys, values = (_turned(part, x) for x in (at(q), of(k), of(v)))
    own, own_lse = inner.forward(queries, keys, values, part.way != "whole", None)
    del queries, keys, values
    to, to_lse = at(out), at(lse)
    if part.way == "backward":
        own, own_lse = own.flip(2), own_lse.flip(2)
    own, own_lse = own.reshape(to.shape), own_lse.reshape(to_lse.shape)
    if part.way == "causal":
        to.copy_(own)
        to_lse.copy_(own_lse)
        return
    weight = torch.sigmoid(own_lse - to_lse)
    to.lerp_(own.to(to.dtype), weight[..., None])
    to_lse.copy_(torch.logaddexp(to_lse, own_lse))


def gradients_of_parts(
    inner: AttentionKernel,
    parts: Iterable[Part],
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    sums: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add the gradients of parts to those of q, k and v, in place; causal ones are written.

    `given` is grad_out, q, k, v, out and lse, where the last two are those of the whole attention.
    """
    for part in parts:
        _add_gradients(inner, part, given, sums)


def _add_gradients(
    inner: AttentionKernel,
    part: Part,
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    sums: tuple[Tensor, Tensor, Tensor],
) -> None:
    grad_out, q, k, v, out, lse = given
    at, of = _at(part, "queries"), _at(part, "keys")
    views = (at(grad_out), at(q), of(k), of(v), at(out), at(lse))
    g, queries, keys, values, own_out, own_lse = (_turned(part, x) for x in views)
    grads = inner.backward(g, queries, keys, values, own_out, own_lse, part.way != "whole", None)
    del g, queries, keys, values, own_out, own_lse
    for place, total, grad in zip((at, of, of), sums, grads, strict=True):
        to = place(total)
        own = (grad.flip(2) if part.way == "backward" else grad).reshape(to.shape)
        if part.way == "causal":
            to.copy_(own)
        else:
            to.add_(own)


def attend_blocks(
    inner: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, blocks: Documents | None
) -> tuple[Tensor, Tensor]:
    """Return the attention of a table of blocks, or room for that of causal parts.

    out [b, h, s, D] and lse [b, h, s] are in the dtype of the merge.
    """
    if blocks is None:
        lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
        return torch.empty_like(q, dtype=lse.dtype), lse
    out, lse = inner.forward(q, k, v, True, blocks)
    return out.to(lse.dtype), lse


def gradients_of_blocks(
    inner: AttentionKernel,
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    blocks: Documents | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a table of blocks, or room for those of causal parts."""
    _, q, k, v, *_ = given
    sum_in = accumulation_dtype(q.dtype)
    if blocks is None:
        dq, dk, dv = (torch.empty_like(x, dtype=sum_in) for x in (q, k, v))
    else:
        dq, dk, dv = (grad.to(sum_in) for grad in inner.backward(*given, True, blocks))
    return dq, dk, dv


def without_blocks(parts: Iterable[Part], blocks: Documents | None) -> Iterator[Part]:
    """Yield the parts that a call for all blocks has not computed."""
    return (part for part in parts if blocks is None or part.way != "causal")


class _Windowed:
    def __init__(self, inner: AttentionKernel, window: int) -> None:
        self.inner, self.window = inner, window

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Documents | None
    ) -> tuple[Tensor, Tensor]:
        """Return out [b, h, s, D] and lse [b, h, s]."""
        if self._reaches_all(q, causal, documents):
            return self.inner.forward(q, k, v, causal, documents)
        blocks = self._blocks(documents)
        out, lse = attend_blocks(self.inner, q, k, v, blocks)
        parts = without_blocks(parts_of(runs_of(q, documents), self.window), blocks)
        attend_parts(self.inner, parts, q, k, v, out, lse)
        return out.to(q.dtype), lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, documents: Documents | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return dq, dk and dv."""
        given = (grad_out, q, k, v, out, lse)
        if self._reaches_all(q, causal, documents):
            return self.inner.backward(*given, causal, documents)
        blocks = self._blocks(documents)
        dq, dk, dv = gradients_of_blocks(self.inner, given, blocks)
        parts = without_blocks(parts_of(runs_of(q, documents), self.window), blocks)
        gradients_of_parts(self.inner, parts, given, (dq, dk, dv))
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

    def _reaches_all(self, q: Tensor, causal: bool, documents: Documents | None) -> bool:
        """Whether no token is outside any window; ValueError for what has no window here."""
        if not causal:
            raise ValueError(
                f"attention with a window of {self.window:,} is causal; whole attention has none"
            )
        if documents is None:
            return self.window >= q.shape[2]
        documents.require(batch=q.shape[0], seq_length=q.shape[2])
        return self.window >= documents.longest

    def _blocks(self, documents: Documents | None) -> Documents | None:
        """Return the table of all blocks, for a kernel that takes them in one call; else None."""
        if documents is None or not self.inner.packed:
            return None
        return documents.cut(self.window)


def _at(part: Part, of: Literal["queries", "keys"]) -> Callable[[Tensor], Tensor]:
    """Return a view of a part's tokens: [b, n, ...] of [b, .., s, ...], or [b, count, .., n, ...].

    Heads stay where they are before the tokens, as [b, h, n, D] or [b, h, n].
    """
    start, stop = part.queries if of == "queries" else part.keys
    end = stop + (part.count - 1) * part.step

    def view(x: Tensor) -> Tensor:
        found = x[part.rows, :, start:end]
        if part.count == 1:
            return found
        blocks = found.unfold(2, stop - start, part.step).movedim(2, 1)  # [b, count, h, (D), n]
        return blocks if x.ndim == 3 else blocks.transpose(-1, -2)

    return view


def _turned(part: Part, x: Tensor) -> Tensor:
    """Return a view [b, h, n, ...] or [b, count, h, n, ...] as a batch, in the part's order."""
    batch = x if part.count == 1 else x.flatten(0, 1)
    return batch.flip(2) if part.way == "backward" else batch
