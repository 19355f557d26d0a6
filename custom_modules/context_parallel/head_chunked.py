# SPDX-License-Identifier: Apache-2.0
"""Head-chunked Ulysses ("Untied Ulysses", UPipe, arXiv 2602.21196): a few heads at a time.

    q, k, v = split(x W);  out = attention(rotate(norm(q)), rotate(norm(k)), v)

over a sequence that C ranks share by zigzag. Ulysses projects, rotates and exchanges all heads,
then attends: q, k and v of every head exist twice, before and after the exchange, 2 (h + 2g) head
slices. Here the function computes the output directly from x, in h/U stages of U query heads:

1. keys and values of G KV heads are projected, rotated and exchanged once, for the stages whose
   query heads share them (G = min(U, g); with g < C each KV head goes to
   C/g ranks, and G is C);
2. each stage projects, rotates and exchanges its U query heads, attends, and sends its output back
   to its place in one output buffer. The exchanged q, k and v have one buffer each, reused by every
   stage.

q, k and v are not kept. The backward rebuilds them stage by stage from x, exchanges output
and gradient of a stage, and sums dk and dv of a KV head over its stages in fp32 (float64 for
float64), dx in the dtype of x. Gradients of the weights are complete at the end: each parameter
receives its gradient once a backward, as Megatron's hooks count on.

Legend: s tokens of this rank, b sequences, h and g heads and KV heads of this TP rank, D head size,
C ranks of the all-to-all, e = s * b * D elements, one head slice of this rank.

Memory on top of x, in slices, b = 1: output, keys and values, exchanged queries, and either the
stage's projection or its output, with their messages:

    forward   h + 2G + 2U + (C-1)/C * U                               (Ulysses about 5h + 4g)
    backward  2h + 4G + 3U + max(U + 2G, 2U + (C-1)/C * U), dx and dW  (Ulysses about 6h + 4g)

and the log-sum-exp, b * s * h numbers. In the backward: output and its gradient; keys, values and
the sums of their gradients (in fp32, so 2G more for bf16); queries, output and gradient of a stage;
what the kernel returns, or dq on its way home. Saved between the two: x and the output, which its
neighbours save as well, and the log-sum-exp. U trades memory for fewer, larger messages and
kernels: from C (least memory) to h (all heads at once).

Bytes sent by a rank, forward: as Ulysses, (C-1)/C * (2h + 2 max(g, C)) * e * element size; backward
in the same units 2h of output and gradient, h of q again, h of dq, 4 max(g, C) of k, v, dk, dv.
With a ring outside (the kernel is then `custom_modules.context_parallel.ring`'s) keys and values go
round the ring once for each stage, so h / (g U / G) times as often as in ring attention alone.

With tensor parallelism x is the sequence-parallel shard: gathered over TP once in forward and once
in backward, its gradient reduce-scattered. Limits: Megatron's grouped order of the projection
(query heads, key, value of each group), half-split rotation, no FP8 projection.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from custom_modules.attention.documents import Documents
from custom_modules.attention.kernel import AttentionKernel
from custom_modules.attention.qkv_projection import Gradients, Projection
from custom_modules.context_parallel.config import require_stage
from custom_modules.context_parallel.ulysses import (
    gather_shares,
    require_heads,
    scatter_sequence,
    scatter_shares,
    split_heads,
)
from custom_modules.dtypes import accumulation_dtype
from custom_modules.memory.recompute import on_attention_backward_done, reuse_saved_attention
from custom_modules.rope.rotary import rotate_
from custom_modules.tensor_parallel import TensorParallel


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadStages:
    """Assignment of heads to stages.

    Query heads share a KV head in runs of neighbours. With fewer KV heads than ranks, each counts
    as C/g "virtual" heads, one a rank.
    """

    heads: int
    kv_heads: int
    ranks: int
    heads_per_stage: int

    def __post_init__(self) -> None:
        """Refuse heads that the ranks cannot share, and stages without whole groups."""
        require_heads(self.heads, self.kv_heads, self.ranks)
        require_stage(self.heads_per_stage, self.heads, self.kv_heads, self.ranks)

    @property
    def virtual(self) -> int:
        """KV heads after replication."""
        return max(self.kv_heads, self.ranks)

    @property
    def group(self) -> int:
        """Query heads of each virtual KV head."""
        return self.heads // self.virtual

    @property
    def kv_per_chunk(self) -> int:
        """Virtual KV heads that are held at a time (G)."""
        return min(self.heads_per_stage, self.virtual)

    @property
    def per_kv(self) -> int:
        """Query heads of each KV head in one stage."""
        return self.heads_per_stage // self.kv_per_chunk

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """Yield the virtual and the true KV heads held together."""
        for start in range(0, self.virtual, self.kv_per_chunk):
            held = slice(start, start + self.kv_per_chunk)
            yield held, held if self.virtual == self.kv_heads else slice(0, self.kv_heads)

    def stages(self) -> Iterator[slice]:
        """Yield the query heads, counted within each KV head, of the stages of a chunk."""
        for start in range(0, self.group, self.per_kv):
            yield slice(start, start + self.per_kv)

    def query_heads(self, chunk: slice, stage: slice) -> list[int]:
        """Return the query heads of a stage, those of a KV head together."""
        return [
            kv * self.group + query
            for kv in range(chunk.start, chunk.stop)
            for query in range(stage.start, stage.stop)
        ]

    def of(self, t: Tensor, chunk: slice, stage: slice) -> list[Tensor]:
        """Return the heads of a stage in `t` [s, b, h, D] by rank, [s, b, G/C, U/G, D] views."""
        heads = t.unflatten(2, (self.virtual, self.group))[:, :, chunk, stage]
        return list(heads.tensor_split(self.ranks, dim=2))


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadChunked:
    """One attention block: how heads are projected, staged, exchanged and attended with."""

    projection: Projection
    stages: HeadStages
    kernel: AttentionKernel
    """The attention kernel, over the keys of the outer ring if there is one."""
    ulysses: dist.ProcessGroup | None
    tensor_parallel: TensorParallel
    table: tuple[Tensor, Tensor] | None
    """cos and sin, fp32 [s, b, 1, R/2], of this rank's positions; None: no rotation."""
    interleaved: bool = False
    """Pairing of dimensions in the rotation (`custom_modules.rope.rotary`)."""
    causal: bool
    documents: Documents | None
    """Documents of the whole sequence."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the output [s, b, h, D], and the log-sum-exp of each stage, [b, U/C, S]."""
        x = self.tensor_parallel.gather(x)
        out = x.new_empty(*x.shape[:2], self.projection.heads, self.projection.head_dim)
        sums, buffers = [], _Buffers()
        for chunk, kv_heads in self.stages.chunks():
            keys, values = self._keys_values(x, kv_heads, buffers)
            for stage in self.stages.stages():
                queries = self._queries(x, chunk, stage, buffers)
                part, lse = self.kernel.forward(queries, keys, values, self.causal, self.documents)
                self._return(part, self.stages.of(out, chunk, stage))
                sums.append(lse)
                del part, queries
            del keys, values  # before the next are made
        return out, *sums

    def backward(
        self, grad_out: Tensor, x: Tensor, out: Tensor, sums: list[Tensor],
        ended: Callable[[], None],
    ) -> Gradients:  # fmt: skip
        """Return the gradients; `grad_out` and `out` are [s, b, h, D], `x` as in the forward.

        `ended` is called before the projection's gradients of the last keys and values.
        """
        x = self.tensor_parallel.gather(x)
        gradients = Gradients.like(x, self.projection)
        buffers = _Buffers()
        remaining = iter(sums)
        for chunk, kv_heads in self.stages.chunks():
            keys, values = self._keys_values(x, kv_heads, buffers)
            dk, dv = (
                torch.zeros_like(t, dtype=accumulation_dtype(t.dtype)) for t in (keys, values)
            )
            for stage in self.stages.stages():
                queries = self._queries(x, chunk, stage, buffers)
                dq, *of_keys = self.kernel.backward(
                    self._exchange(self.stages.of(grad_out, chunk, stage), "grad", buffers),
                    queries, keys, values,
                    self._exchange(self.stages.of(out, chunk, stage), "out", buffers),
                    next(remaining), self.causal, self.documents,
                )  # fmt: skip
                del queries
                dk += of_keys[0]
                dv += of_keys[1]
                del of_keys
                self._queries_backward(dq, x, chunk, stage, gradients)
                del dq
            del keys, values
            if chunk.stop == self.stages.virtual:
                ended()
            self._keys_values_backward(dk, dv, x, kv_heads, gradients)
        return gradients

    def _keys_values(
        self, x: Tensor, kv_heads: slice, buffers: "_Buffers"
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values [b, G/C, S, D], projected, rotated and exchanged."""
        rows, size = self.projection.keys(kv_heads), self.stages.ranks
        keys = self._normalize_and_rotate(self.projection.forward(x, rows), self.projection.k_norm)
        keys = self._exchange(split_heads(keys, size), "keys", buffers)
        values = self.projection.forward(x, rows + 1)
        return keys, self._exchange(split_heads(values, size), "values", buffers)

    def _keys_values_backward(
        self, dk: Tensor, dv: Tensor, x: Tensor, kv_heads: slice, gradients: Gradients
    ) -> None:
        rows = self.projection.keys(kv_heads)
        dk = self._normalize_and_rotate_backward(
            self._gradient(dk, len(rows), x.dtype),
            x,
            rows,
            self.projection.k_norm,
            gradients.k_norm,
        )
        self.projection.backward(dk, x, rows, gradients)
        del dk
        self.projection.backward(self._gradient(dv, len(rows), x.dtype), x, rows + 1, gradients)

    def _queries(self, x: Tensor, chunk: slice, stage: slice, buffers: "_Buffers") -> Tensor:
        """Return the queries of a stage, [b, U/C, S, D], projected, rotated and exchanged."""
        rows = self.projection.queries(self.stages.query_heads(chunk, stage))
        made = self._normalize_and_rotate(self.projection.forward(x, rows), self.projection.q_norm)
        return self._exchange(split_heads(made, self.stages.ranks), "queries", buffers)

    def _queries_backward(
        self, dq: Tensor, x: Tensor, chunk: slice, stage: slice, gradients: Gradients
    ) -> None:
        rows = self.projection.queries(self.stages.query_heads(chunk, stage))
        dq = self._normalize_and_rotate_backward(
            self._gradient(dq, len(rows), x.dtype),
            x,
            rows,
            self.projection.q_norm,
            gradients.q_norm,
        )
        self.projection.backward(dq, x, rows, gradients)

    def _normalize_and_rotate(self, heads: Tensor, norm: nn.Module | None) -> Tensor:
        """Return heads [s, b, n, D] normalised and rotated; the argument is not kept."""
        if norm is not None:
            heads = norm(heads)
        return heads if self.table is None else rotate_(heads, *self.table, self.interleaved)

    def _normalize_and_rotate_backward(
        self, grad: Tensor, x: Tensor, rows: Tensor, norm: nn.Module | None, into: list[Tensor]
    ) -> Tensor:
        """Return the gradient of the projection's output, and add those of the norm to `into`."""
        if self.table is not None:
            cos, sin = self.table
            grad = rotate_(grad, cos, -sin, self.interleaved)
        if norm is None:
            return grad
        parameters = {name: p.detach().requires_grad_() for name, p in norm.named_parameters()}
        projected = self.projection.forward(x, rows).requires_grad_()
        with torch.enable_grad():
            normalised = functional_call(norm, parameters, projected)
        of_heads, *of_norm = torch.autograd.grad(
            normalised, [projected, *parameters.values()], grad
        )
        for total, part in zip(into, of_norm, strict=True):
            total.add_(part)
        return of_heads

    def _exchange(self, shares: list[Tensor], name: str, buffers: "_Buffers") -> Tensor:
        """Return this rank's share over the inner group's sequence, [b, n, S, D]."""
        if self.ulysses is None:
            return shares[0].flatten(2, -2).permute(1, 2, 0, 3)
        whole = gather_shares(shares, self.ulysses, into=buffers.get(name))
        buffers[name] = whole
        return whole.permute(1, 2, 0, 3)

    def _return(self, t: Tensor, shares: list[Tensor]) -> None:
        """Write an output [b, n, S, D] back to its heads on the ranks that hold its tokens."""
        if self.ulysses is None:
            shares[0].copy_(t.permute(2, 0, 1, 3).view_as(shares[0]))
        else:
            scatter_shares(t.permute(2, 0, 1, 3), shares, self.ulysses)

    def _gradient(self, t: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        """Return a gradient [b, n, S, D] as that of this rank's tokens, [s, b, heads, D]."""
        t = t.permute(2, 0, 1, 3)
        if self.ulysses is None:
            return t.to(dtype)
        return scatter_sequence(t, self.ulysses, heads=heads, dtype=dtype)


class _Buffers(dict[str, Tensor]):
    """Buffers that the first stage allocates and every later one reuses."""


class _HeadChunkedAttention(torch.autograd.Function):
    """Saves x [s, b, hidden], the output [s, b, h, D] and the log-sum-exp of each stage.

    Takes the parameters of the block as well, so that autograd passes their gradients on.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x: Tensor, block: HeadChunked, *parameters: Tensor
    ) -> Tensor:
        out, *sums = reuse_saved_attention(lambda: block.forward(x))
        ctx.block, ctx.ended = block, on_attention_backward_done()
        ctx.save_for_backward(x, out, *sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):  # type: ignore[no-untyped-def]
        x, out, *sums = ctx.saved_tensors
        gradients = ctx.block.backward(grad_out, x, out, sums, ctx.ended)
        dx = ctx.block.tensor_parallel.reduce(gradients.x)
        parameters = ctx.block.projection.parameters()
        return (
            dx,
            None,
            *(
                grad.to(parameter.dtype)
                for grad, parameter in zip(gradients.of_parameters(), parameters, strict=True)
            ),
        )


def head_chunked_attention(x: Tensor, block: HeadChunked) -> Tensor:
    """Return the attention output [s, b, h, D], before its projection, of x [s, b, hidden].

    With sequence parallelism x is this TP rank's part of the s tokens. Raises ValueError if x and
    the weights differ in dtype, or if the document table does not fit the sequence.
    """
    weight = block.projection.weight
    if x.dtype != weight.dtype:
        raise ValueError(
            f"attention input is {x.dtype} and the projection {weight.dtype}; cast them to one"
        )
    parameters = block.projection.parameters()
    out: Tensor = _HeadChunkedAttention.apply(x, block, *parameters)
    return out
