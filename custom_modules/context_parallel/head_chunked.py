# SPDX-License-Identifier: Apache-2.0
"""Head-chunked Ulysses ("Untied Ulysses", UPipe, arXiv 2602.21196): a few heads at a time.

    q, k, v = split(x W);  out = attention(rotate(norm(q)), rotate(norm(k)), v)

over a sequence that C ranks share by zigzag. Ulysses projects, rotates and exchanges all heads,
then attends: q, k and v of every head exist twice, before and after the exchange, 2 (h + 2g) head
slices. Here the function computes the output directly from x, in h/U stages of U query heads:

1. keys and values of G KV heads are projected, rotated and exchanged once, for the stages whose
   query heads share them (G = min(U, g); with g < C each KV head goes to C/g ranks, and G is C);
2. each stage projects, rotates and exchanges its U query heads, attends, and sends its output back
   to its place in one output buffer.

q, k and v are not kept. The backward rebuilds them stage by stage from x, exchanges output
and gradient of a stage, and sums dk and dv of a KV head over its stages in fp32 (float64 for
float64), dx in the dtype of x. Gradients of the weights are complete at the end: each parameter
receives its gradient once a backward, as Megatron's hooks count on.

Order of the messages, the same on every rank. While they are in flight, something is computed:

    forward   the next queries are sent before a stage attends, if the keys and values stay; else
              these are projected while the output returns, and the queries while these are sent
    backward  the next queries are projected while dq returns; then they, the next output and its
              gradient are exchanged while the gradients of the projection are computed

Legend: s tokens of this rank, b sequences, h and g heads and KV heads of this TP rank, D head size,
C ranks of the all-to-all, e = s * b * D elements, one head slice of this rank; r = (C-1)/C.

Memory on top of x, in slices, b = 1, C > 1, where several stages share their keys and values:

    forward   h + 2G + (3 + r) U                        (Ulysses about 5h + 4g)
    backward  2h + 4G + 4U + max(2G, 3r U), dx and dW   (Ulysses about 6h + 4g)

and where none do:

    forward   h + 2G + max((2 + r) U, (2 + 2r) G)
    backward  2h + 4G + 4U + r (U + 2G), dx and dW

and the log-sum-exp, b * s * h numbers. Forward: output; keys and values; the stage's queries and
output; the next stage's queries, received and packed to be sent. Backward: output and its gradient;
keys, values and, in the first case, the sums of their gradients (in fp32, so 2G more for bf16);
queries, output and gradient of a stage; what the kernel returns or, after it, dq and the next
stage's three tensors, received and packed. In the second case the most is held while all that a
stage attends with is exchanged. C = 1 sends nothing: h + 2G + 2U, and 2h + 2U + 6G (second case:
4G). `custom_modules.context_parallel.cost` has it as code.

Saved between the two: x and the output, which its neighbours save as well, and the log-sum-exp. U
trades memory for fewer, larger messages and kernels: from C (least memory) to h (one stage).

Bytes sent by a rank, forward: as Ulysses, r * (2h + 2 max(g, C)) * e * element size; backward
in the same units 2h of output and gradient, h of q again, h of dq, 4 max(g, C) of k, v, dk, dv.
With a ring outside (the kernel is then `custom_modules.context_parallel.ring`'s) keys and values go
round the ring once for each stage, so h / (g U / G) times as often as in ring attention alone.

With tensor parallelism x is the sequence-parallel shard: gathered over TP once in forward and once
in backward, its gradient reduce-scattered. Limits: Megatron's grouped order of the projection
(query heads, key, value of each group), half-split rotation. The projection is in x's dtype, also
where the rest of the layer computes in FP8: x in FP8 and its transpose would be as many bytes as x.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from custom_modules.attention.documents import Documents
from custom_modules.attention.kernel import AttentionKernel
from custom_modules.attention.qkv_projection import Gradients, Projection
from custom_modules.context_parallel.head_stages import HeadStages, Stage
from custom_modules.context_parallel.p2p import Messages
from custom_modules.context_parallel.ulysses import (
    Gathering,
    scatter_sequence,
    split_heads,
    start_gather,
    start_scatter,
)
from custom_modules.dtypes import accumulation_dtype
from custom_modules.memory.recompute import on_attention_backward_done, reuse_saved_attention
from custom_modules.rope.rotary import rotate_
from custom_modules.tensor_parallel import TensorParallel


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
        sums: list[Tensor] = []
        ahead: list[Tensor] = []
        for stage, following in self.stages.order():
            if stage.opens:
                held, coming = self._open(x, stage, ahead)
            queries = coming.wait()
            next_queries = self._queries(following) if following and not following.opens else []
            if next_queries and self.ulysses is not None:
                coming = self._send(self._project(x, next_queries))
            part, lse = self.kernel.forward(
                _bhsd(queries[0]), _bhsd(held[0]), _bhsd(held[1]), self.causal, self.documents
            )
            sums.append(lse)
            queries.clear()
            if stage.closes:
                held.clear()
            arrive = self._send_output(part, out, stage)
            del part
            if following and following.opens and self.ulysses is not None:
                ahead = self._project(x, self._keys(following))
            arrive()
            if next_queries and self.ulysses is None:
                coming = self._send(self._project(x, next_queries))
        return out, *sums

    def backward(
        self, grad_out: Tensor, x: Tensor, out: Tensor, sums: list[Tensor],
        ended: Callable[[], None],
    ) -> Gradients:  # fmt: skip
        """Return the gradients; `grad_out` and `out` are [s, b, h, D], `x` as in the forward.

        `ended` is called after the last kernel.
        """
        x = self.tensor_parallel.gather(x)
        gradients = Gradients.like(x, self.projection)
        stages = self.stages.order()
        held: list[Tensor] = []
        of_held: list[Tensor] = []
        coming: Gathering | None = None
        results = self._send_results(grad_out, out, stages[0][0])
        for (stage, following), lse in zip(stages, sums, strict=True):
            parts = [*self._queries(stage), *(self._keys(stage) if stage.opens else [])]
            heads = [] if coming else self._project(x, parts)
            grad, result = results.wait()
            queries, *keys = (coming or self._send(heads)).wait()
            coming, heads = None, []
            held = keys or held
            dq, *of_keys = self.kernel.backward(
                _bhsd(grad), _bhsd(queries), _bhsd(held[0]), _bhsd(held[1]), _bhsd(result), lse,
                self.causal, self.documents,
            )  # fmt: skip
            del grad, result, queries, keys
            of_held = _sum(of_held, of_keys, stage)
            del of_keys
            if stage.closes:
                held = []
            if following is None:
                ended()
            parts = [*self._queries(stage), *(self._keys(stage) if stage.closes else [])]
            arrive = self._send_home([dq, *(of_held if stage.closes else [])], parts, x)
            del dq
            if stage.closes:
                of_held = []
            if following and not following.opens and self.ulysses is not None:
                heads = self._project(x, self._queries(following))
            of_parts = arrive()
            if heads:
                coming, heads = self._send(heads), []
            if following:
                results = self._send_results(grad_out, out, following)
            self._project_backward(of_parts, x, parts, gradients)
            del arrive, of_parts
        return gradients

    def _queries(self, stage: Stage) -> list["_Part"]:
        heads = self.stages.query_heads(stage.chunk, stage.queries)
        return [_Part("queries", self.projection.queries(heads))]

    def _keys(self, stage: Stage) -> list["_Part"]:
        """Return the keys and the values of a chunk."""
        return [
            _Part("keys", self.projection.keys(stage.kv_heads)),
            _Part("values", self.projection.values(stage.kv_heads)),
        ]

    def _open(
        self, x: Tensor, stage: Stage, projected: list[Tensor]
    ) -> tuple[list[Tensor], Gathering]:
        """Return the keys and values of a chunk, and its first queries as they are exchanged.

        `projected` may hold the keys and values before their exchange, and is emptied.
        """
        keys = self._send(projected or self._project(x, self._keys(stage)))
        projected.clear()
        queries = self._project(x, self._queries(stage))
        held = keys.wait()
        return held, self._send(queries)

    def _project(self, x: Tensor, parts: list["_Part"]) -> list[Tensor]:
        """Return heads [s, b, n, D] of x, normalised and rotated.

        They come from one product if all are packed next, so that none outlives the others. A norm
        gets its heads contiguous.
        """
        if self.ulysses is None or any(self._norm(part) is not None for part in parts):
            projected = [self.projection.forward(x, part.rows) for part in parts]
        else:
            rows = torch.cat([part.rows for part in parts])
            counts = [len(part.rows) for part in parts]
            projected = list(self.projection.forward(x, rows).split(counts, dim=2))
        return [
            self._normalize_and_rotate(heads, part)
            for heads, part in zip(projected, parts, strict=True)
        ]

    def _project_backward(
        self, grads: list[Tensor], x: Tensor, parts: list["_Part"], gradients: Gradients
    ) -> None:
        """Add to `gradients`, given those of all parts in one tensor or of each in its own."""
        together = [parts] if len(grads) == 1 else [[part] for part in parts]
        for grad, alike in zip(grads, together, strict=True):
            counts = [len(part.rows) for part in alike]
            for of_part, part in zip(grad.split(counts, dim=2), alike, strict=True):
                self._normalize_and_rotate_backward(of_part, x, part, gradients)
            rows = torch.cat([part.rows for part in alike])
            self.projection.backward(grad, x, rows, gradients)

    def _norm(self, part: "_Part") -> nn.Module | None:
        norms = {"queries": self.projection.q_norm, "keys": self.projection.k_norm}
        return norms.get(part.kind)

    def _normalize_and_rotate(self, heads: Tensor, part: "_Part") -> Tensor:
        """Return heads [s, b, n, D] normalised and rotated; the argument is not kept."""
        norm = self._norm(part)
        if norm is not None:
            heads = norm(heads)
        if self.table is None or part.kind == "values":
            return heads
        return rotate_(heads, *self.table, self.interleaved)

    def _normalize_and_rotate_backward(
        self, grad: Tensor, x: Tensor, part: "_Part", gradients: Gradients
    ) -> None:
        """Turn `grad` into the gradient of the projection's output; add those of the norm."""
        if self.table is not None and part.kind != "values":
            cos, sin = self.table
            rotate_(grad, cos, -sin, self.interleaved)
        norm = self._norm(part)
        if norm is None:
            return
        parameters = {name: p.detach().requires_grad_() for name, p in norm.named_parameters()}
        projected = self.projection.forward(x, part.rows).requires_grad_()
        with torch.enable_grad():
            normalised = functional_call(norm, parameters, projected)
        inputs = [projected, *parameters.values()]
        of_heads, *of_norm = torch.autograd.grad(normalised, inputs, grad.contiguous())
        into = gradients.q_norm if part.kind == "queries" else gradients.k_norm
        for total, of_parameter in zip(into, of_norm, strict=True):
            total.add_(of_parameter)
        grad.copy_(of_heads)

    def _send(self, heads: Sequence[Tensor]) -> Gathering:
        """Start to exchange projected heads, [s, b, n, D]; they arrive as [S, b, n/C, D]."""
        return self._gather([split_heads(t, self.stages.ranks) for t in heads])

    def _send_results(self, grad_out: Tensor, out: Tensor, stage: Stage) -> Gathering:
        """Start to exchange the heads of a stage of the output's gradient and of the output."""
        of = stage.chunk, stage.queries
        return self._gather([self.stages.of(t, *of) for t in (grad_out, out)])

    def _gather(self, tensors: Sequence[Sequence[Tensor]]) -> Gathering:
        if self.ulysses is None:
            return Gathering([shares[0].flatten(2, -2) for shares in tensors], Messages([], []))
        return start_gather(tensors, self.ulysses)

    def _send_output(self, part: Tensor, out: Tensor, stage: Stage) -> Callable[[], None]:
        """Start to return a stage's output [b, n, S, D]; what is returned waits and writes it."""
        shares = self.stages.of(out, stage.chunk, stage.queries)
        if self.ulysses is None:
            shares[0].copy_(_sbhd(part).view_as(shares[0]))
            return lambda: None
        home = start_scatter([_sbhd(part)], self.ulysses)
        return lambda: home.finish([shares])

    def _send_home(
        self, grads: list[Tensor], parts: list["_Part"], x: Tensor
    ) -> Callable[[], list[Tensor]]:
        """Start to return the gradients [b, n, S, D] of projected parts.

        The result waits for them and returns those of this rank's tokens, in one [s, b, n, D], or
        each in its own if C = 1. If several ranks share a KV head, its gradient is their sum in
        fp32 (float64 for float64), and keys and values return one by one to hold fewer bytes.
        """
        if self.ulysses is None:
            own = [_sbhd(t).to(x.dtype) for t in grads]
            return lambda: own
        group, ranks = self.ulysses, self.stages.ranks
        at_once = 1 if self.stages.replicated else len(grads)
        home = start_scatter([_sbhd(t).to(x.dtype) for t in grads[:at_once]], group)
        later = list(grads[at_once:])

        def arrive() -> list[Tensor]:
            counts = [len(part.rows) for part in parts]
            together = x.new_empty(*x.shape[:2], sum(counts), self.projection.head_dim)
            places = together.split(counts, dim=2)
            home.finish([split_heads(place, ranks) for place in places[:at_once]])
            for place, heads in zip(places[at_once:], counts[at_once:], strict=True):
                t = _sbhd(later.pop(0))
                place.copy_(scatter_sequence(t, group, heads=heads, dtype=x.dtype))
            return [together]

        return arrive


class _Part(NamedTuple):
    """Heads that a stage projects, as rows of the projection in units of a head."""

    kind: Literal["queries", "keys", "values"]
    rows: Tensor


def _sum(total: list[Tensor], of_stage: list[Tensor], stage: Stage) -> list[Tensor]:
    """Return the gradients of keys and values up to a stage; in fp32 or float64 if it adds any."""
    if not stage.opens:
        for sums, part in zip(total, of_stage, strict=True):
            sums.add_(part)
        return total
    if stage.closes:
        return of_stage
    return [t.to(accumulation_dtype(t.dtype)) for t in of_stage]


def _bhsd(t: Tensor) -> Tensor:
    return t.permute(1, 2, 0, 3)


def _sbhd(t: Tensor) -> Tensor:
    return t.permute(2, 0, 1, 3)


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
