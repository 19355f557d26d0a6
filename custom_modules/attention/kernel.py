# SPDX-License-Identifier: Apache-2.0
"""The interface of attention kernels: a pair of functions, forward and backward.

    forward(q, k, v, causal, documents)                      -> out, lse
    backward(grad_out, q, k, v, out, lse, causal, documents) -> dq, dk, dv

for softmax(q k^T / sqrt(D)) v. Having the log-sum-exp outside the kernel is what merging partial
results (ring attention) and keeping attention through a recompute need, so every parallel
attention of this package is written once over this pair.

Legend: b batch, h query heads, g KV heads (g divides h; query heads share a KV head in runs of
h / g neighbours), s queries, t keys, D head size.

    q, out, grad_out, dq [b, h, s, D]    k, v, dk, dv [b, g, t, D]    lse [b, h, s]

One dtype for all but lse, which is fp32 (float64 for float64 inputs). Tensors may be strided in
every dimension but the last. `causal` and `documents` need s = t. `out` and `lse` given to the
backward may be those of a longer attention of which (q, k, v) is a part: the gradients are then
this part's share, which is what makes ring attention's backward exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from custom_modules.attention.documents import Documents
from custom_modules.dtypes import accumulation_dtype

Forward: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, bool, Documents | None], tuple[Tensor, Tensor]
]
Backward: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, Documents | None],
    tuple[Tensor, Tensor, Tensor],
]
DenseForward: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
DenseBackward: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]
]


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """A forward and its backward, under one name, with the cases that they cannot serve."""

    name: str
    refusal: Callable[[torch.device, torch.dtype, int], str | None]
    """Why the kernel cannot serve a device, dtype and head size, as the end of a sentence that
    begins with its name; None if it can."""
    forward: Forward
    backward: Backward
    packed: bool = False
    """Whether documents of any lengths take one call. Otherwise each takes a call of its own, for
    which cuDNN and Transformer Engine make a plan on the host for each new length."""


def by_document(forward: DenseForward, backward: DenseBackward) -> tuple[Forward, Backward]:
    """Return a pair that supports documents by one call of the given pair for each document."""

    def forward_within(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Documents | None
    ) -> tuple[Tensor, Tensor]:
        if documents is None:
            return forward(q, k, v, causal)
        documents.require(batch=q.shape[0], seq_length=q.shape[2])
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
        for row in range(documents.batch):
            for start, stop in documents.spans(row):
                here = (slice(row, row + 1), slice(None), slice(start, stop))
                out[here], lse[here] = forward(q[here], k[here], v[here], causal)
        return out, lse

    def backward_within(
        grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, documents: Documents | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if documents is None:
            return backward(grad_out, q, k, v, out, lse, causal)
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        for row in range(documents.batch):
            for start, stop in documents.spans(row):
                here = (slice(row, row + 1), slice(None), slice(start, stop))
                dq[here], dk[here], dv[here] = backward(
                    grad_out[here], q[here], k[here], v[here], out[here], lse[here], causal
                )
        return dq, dk, dv

    return forward_within, backward_within
