# SPDX-License-Identifier: Apache-2.0
"""Measured cost of each kind of context parallelism on the ranks of a group.

The block measured is the part that differs between kinds: x [s, b, hidden] -> projected, rotated,
attended -> [s, b, h, D], forward and backward, without the output projection. Each kind is compared
with the same block on one rank that has the whole sequence. Time is that of the slowest rank, bytes
those of the rank that holds most, together with the formulas of
`custom_modules.context_parallel.cost`.
"""

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from custom_modules.attention.documents import Documents, tokens_of
from custom_modules.attention.qkv_projection import Projection
from custom_modules.attention.registry import kernel_for
from custom_modules.context_parallel.attend import Groups, attend, split_group
from custom_modules.context_parallel.config import (
    ContextParallelKind,
    Degrees,
    degrees,
    stage_sizes,
    ulysses_sizes,
)
from custom_modules.context_parallel.cost import AttentionShape
from custom_modules.context_parallel.head_chunked import HeadChunked, head_chunked_attention
from custom_modules.context_parallel.head_stages import HeadStages
from custom_modules.profiling.byte_counter import ByteCounter
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import inverse_frequencies, rotary_table, rotate
from custom_modules.tensor_parallel import TensorParallel

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Tolerance, relative to the largest value: summed rounding of the dtype over a long sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The attention block that is measured, over all ranks."""

    seq_length: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    dtype: torch.dtype
    causal: bool = True
    documents: Documents | None = None
    kernel: str = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One kind on one block; bytes of the rank that holds most, seconds of the slowest."""

    degrees: Degrees
    error: float
    """Largest deviation of output, dx and dW from one rank's, over the largest value."""
    sent_bytes: int
    """Bytes sent in one forward."""
    sent_formula: int
    forward_peak: int
    forward_formula: int
    backward_peak: int
    """In addition to x, the output and its gradient; head-chunked: also those of x and weight."""
    backward_formula: int
    forward_seconds: float
    backward_seconds: float


def kinds_for(size: int, heads: int, kv_heads: int) -> list[ContextParallelKind]:
    """Return every kind that `size` ranks can run with these heads, head-chunked at each U."""
    inner = [n for n in ulysses_sizes(heads, kv_heads) if n > 1 and size % n == 0]
    kinds = [ContextParallelKind(kind="ring")]
    for ulysses in inner:
        for stage in [None, *stage_sizes(heads, kv_heads, ulysses)[:-1]]:
            if ulysses < size:
                kinds.append(
                    ContextParallelKind(kind="hybrid", ulysses=ulysses, heads_per_stage=stage)
                )
            elif stage is None:
                kinds.append(ContextParallelKind(kind="ulysses"))
            else:
                kinds.append(ContextParallelKind(kind="head_chunked", heads_per_stage=stage))
    return kinds


class Probe:
    """A block's inputs on this rank, and the result of one rank for the whole sequence."""

    def __init__(self, block: Block, group: dist.ProcessGroup, device: torch.device) -> None:
        """Draw the same inputs on every rank, and let the first one compute the reference."""
        self.block, self.group, self.device = block, group, device
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        draw = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=draw, dtype=torch.float32)
            return values.to(device, block.dtype)

        rows = (block.heads + 2 * block.kv_heads) * block.head_dim
        self.x = drawn(block.seq_length, block.batch, block.hidden)
        self.weight = (drawn(rows, block.hidden) / block.hidden**0.5).requires_grad_()
        self.grad_out = drawn(block.seq_length, block.batch, block.heads, block.head_dim)
        self.kernel = kernel_for(
            device, block.dtype, block.head_dim, block.kernel,
            documents=block.documents is not None,
        )  # fmt: skip
        self.mine = tokens_of(self.rank, self.size, block.seq_length).to(device)
        self.reference = self._of_one_rank()

    def measure(self, kind: ContextParallelKind, repeats: int) -> Measured:
        """Run one kind; every rank of the group must call it. Raises ValueError if it cannot."""
        block = self.block
        chosen = degrees(
            kind,
            size=self.size,
            heads=block.heads,
            kv_heads=block.kv_heads,
            head_dim=block.head_dim,
            seq_length=block.seq_length,
            ranks_per_link=self.size,
        )
        groups = split_group(self.group, chosen.ulysses)
        table = self._table(self.mine)
        x = self.x[self.mine].requires_grad_()
        grad_out = self.grad_out[self.mine]

        def run() -> Tensor:
            return self._block(x, table, groups, chosen)

        error = self._deviation(run(), x, grad_out)
        forward, backward = [], []
        for _ in range(repeats):
            self._settle()
            start = time.perf_counter()
            out = run()
            self._settle()
            middle = time.perf_counter()
            out.backward(grad_out)
            self._settle()
            forward.append(middle - start)
            backward.append(time.perf_counter() - middle)
            del out
        x.grad = self.weight.grad = None
        with ByteCounter() as ledger:
            out = run()
            of_forward = ledger.peak_bytes, ledger.sent_bytes
            ledger.restart()
            out.backward(grad_out.clone())
        x.grad = self.weight.grad = None
        shape = AttentionShape(
            degrees=chosen,
            heads=block.heads,
            kv_heads=block.kv_heads,
            head_dim=block.head_dim,
            tokens=block.seq_length // self.size,
            batch=block.batch,
            element_bytes=block.dtype.itemsize,
            causal=block.causal,
            ring_rank=self.rank // chosen.ulysses,
        )
        gradients = x.nbytes + self.weight.nbytes if chosen.heads_per_stage else 0
        over_ranks = self._largest(
            [
                error, of_forward[1], shape.forward_sent, of_forward[0], shape.forward_peak,
                ledger.peak_bytes, shape.backward_peak + gradients,
                statistics.median(forward), statistics.median(backward),
            ]
        )  # fmt: skip
        return Measured(
            degrees=chosen,
            error=over_ranks[0],
            sent_bytes=int(over_ranks[1]),
            sent_formula=int(over_ranks[2]),
            forward_peak=int(over_ranks[3]),
            forward_formula=int(over_ranks[4]),
            backward_peak=int(over_ranks[5]),
            backward_formula=int(over_ranks[6]),
            forward_seconds=over_ranks[7],
            backward_seconds=over_ranks[8],
        )

    def _block(
        self, x: Tensor, table: tuple[Tensor, Tensor], groups: Groups, chosen: Degrees
    ) -> Tensor:
        block = self.block
        projection = Projection(
            weight=self.weight, bias=None, heads=block.heads, kv_heads=block.kv_heads,
            head_dim=block.head_dim, q_norm=None, k_norm=None,
        )  # fmt: skip
        if chosen.heads_per_stage is None:
            q, k, v = self._projected(x, table)
            return attend(
                q, k, v, kernel=self.kernel, groups=groups, causal=block.causal,
                documents=block.documents,
            )  # fmt: skip
        return head_chunked_attention(
            x,
            HeadChunked(
                projection=projection,
                stages=HeadStages(
                    heads=block.heads, kv_heads=block.kv_heads, ranks=chosen.ulysses,
                    heads_per_stage=chosen.heads_per_stage,
                ),
                kernel=groups.kernel(self.kernel),
                ulysses=groups.ulysses,
                tensor_parallel=TensorParallel(group=None, sequence_parallel=False),
                table=table,
                causal=block.causal,
                documents=block.documents,
            ),
        )  # fmt: skip

    def _projected(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        block = self.block
        by_group = self.weight.unflatten(0, (block.kv_heads, -1, block.head_dim))
        weights = (
            by_group[:, :-2].flatten(0, 2),
            by_group[:, -2].flatten(0, 1),
            by_group[:, -1].flatten(0, 1),
        )
        q, k, v = (
            torch.nn.functional.linear(x, weight).unflatten(2, (-1, block.head_dim))
            for weight in weights
        )
        return rotate(q, *table), rotate(k, *table), v

    def _table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        frequencies, _ = inverse_frequencies(RopeScaling.base_change(500_000), self.block.head_dim)
        ids = positions[None].expand(self.block.batch, -1)
        return rotary_table(ids, frequencies.to(self.device))

    def _of_one_rank(self) -> list[Tensor]:
        """Return output, dx and dW over the whole sequence, from the first rank."""
        block = self.block
        shape = (block.seq_length, block.batch)
        answer = [
            self.x.new_empty(*shape, block.heads, block.head_dim),
            torch.empty_like(self.x),
            torch.empty_like(self.weight),
        ]
        if self.rank == 0:
            x = self.x.clone().requires_grad_()
            q, k, v = self._projected(x, self._table(torch.arange(len(x), device=self.device)))
            out = attend(
                q, k, v, kernel=self.kernel, groups=Groups(None, None), causal=block.causal,
                documents=block.documents,
            )  # fmt: skip
            grads = torch.autograd.grad(out, (x, self.weight), self.grad_out)
            answer = [t.detach().contiguous() for t in (out, *grads)]
        for tensor in answer:
            dist.broadcast(tensor, dist.get_global_rank(self.group, 0), group=self.group)
        return answer

    def _deviation(self, out: Tensor, x: Tensor, grad_out: Tensor) -> float:
        """Return the deviation of output, dx and dW from one rank's, over the largest value."""
        dx, dw = torch.autograd.grad(out, (x, self.weight), grad_out)
        dw = dw.float() if dw.dtype != torch.float64 else dw  # summed as training sums it
        dist.all_reduce(dw, group=self.group)
        whole_out, whole_dx, whole_dw = self.reference
        pairs = [(out, whole_out[self.mine]), (dx, whole_dx[self.mine]), (dw, whole_dw)]
        errors = [
            (ours.double() - right.double()).abs().max() / right.double().abs().max()
            for ours, right in pairs
        ]
        worst = torch.stack(errors).max()
        # A maximum over ranks need not keep NaN; it keeps infinity.
        return float("inf") if worst.isnan() else float(worst)

    def _largest(self, values: list[float]) -> list[float]:
        over_ranks = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(over_ranks, dist.ReduceOp.MAX, group=self.group)
        return over_ranks.tolist()

    def _settle(self) -> None:
        """Wait for the device, then for the other ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(group=self.group)
