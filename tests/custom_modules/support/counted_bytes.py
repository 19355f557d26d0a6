# SPDX-License-Identifier: Apache-2.0
"""What one attention block holds and sends on this rank, counted as it runs."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from custom_modules.attention.qkv_projection import Projection
from custom_modules.attention.registry import CPU_FLASH
from custom_modules.context_parallel.attend import Groups, attend, split_group
from custom_modules.context_parallel.head_chunked import HeadChunked, head_chunked_attention
from custom_modules.context_parallel.head_stages import HeadStages
from custom_modules.profiling.byte_counter import ByteCounter
from custom_modules.tensor_parallel import TensorParallel

TOKENS, HEAD_DIM, HIDDEN = 32, 16, 8


class Case(NamedTuple):
    """A block on one rank of TOKENS tokens a sequence."""

    heads: int
    kv_heads: int
    ulysses: int
    heads_per_stage: int | None = None
    causal: bool = True
    batch: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def slice_bytes(self) -> int:
        """One head of this rank's tokens."""
        return TOKENS * self.batch * HEAD_DIM * self.dtype.itemsize


class Counted(NamedTuple):
    """Bytes of one rank, those of q, k and v among them where a block begins with them."""

    forward_peak: int
    forward_sent: int
    kept: int
    """Live between forward and backward."""
    backward_peak: int
    backward_sent: int


def counted(case: Case) -> Counted:
    """Run the block forward and backward over all ranks and count.

    q, k and v come from tensors that are not counted, so that they live as long as someone keeps
    them, as in a layer.
    """
    groups = split_group(dist.group.WORLD, case.ulysses)
    leaves = _hidden(case) if case.heads_per_stage else _heads(case)
    run = _from_hidden if case.heads_per_stage else _from_heads
    with ByteCounter() as ledger:
        out = run(case, groups, *leaves)
        forward = ledger.peak_bytes, ledger.sent_bytes, ledger.live_bytes
        ledger.restart()
        torch.autograd.grad(out, leaves, torch.randn_like(out))
    return Counted(*forward, ledger.peak_bytes, ledger.sent_bytes)


def _heads(case: Case) -> list[Tensor]:
    return [
        torch.randn(TOKENS, case.batch, n, HEAD_DIM, dtype=case.dtype, requires_grad=True)
        for n in (case.heads, case.kv_heads, case.kv_heads)
    ]


def _hidden(case: Case) -> list[Tensor]:
    rows = (case.heads + 2 * case.kv_heads) * HEAD_DIM
    return [
        torch.randn(TOKENS, case.batch, HIDDEN, dtype=case.dtype, requires_grad=True),
        torch.randn(rows, HIDDEN, dtype=case.dtype, requires_grad=True),
    ]


def _from_heads(case: Case, groups: Groups, *heads: Tensor) -> Tensor:
    q, k, v = (t.clone() for t in heads)
    return attend(q, k, v, kernel=CPU_FLASH, groups=groups, causal=case.causal)


def _from_hidden(case: Case, groups: Groups, x: Tensor, weight: Tensor) -> Tensor:
    block = HeadChunked(
        projection=Projection(
            weight=weight,
            bias=None,
            heads=case.heads,
            kv_heads=case.kv_heads,
            head_dim=HEAD_DIM,
            q_norm=None,
            k_norm=None,
        ),
        stages=HeadStages(
            heads=case.heads,
            kv_heads=case.kv_heads,
            ranks=case.ulysses,
            heads_per_stage=case.heads_per_stage,
        ),
        kernel=groups.kernel(CPU_FLASH),
        ulysses=groups.ulysses,
        tensor_parallel=TensorParallel(group=None, sequence_parallel=False),
        table=None,
        causal=case.causal,
        documents=None,
    )
    return head_chunked_attention(x, block)
