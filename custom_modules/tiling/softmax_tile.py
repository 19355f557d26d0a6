# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy's elementwise work on one tile of logits: reduce it, then write its gradient there.

    lse = log(sum(exp(z)))        dz = a * exp(z - lse) - c - d * onehot(label)

for rows z [v] of a tile [n, v] and numbers a, c, d of each row (`LogitGradient`). With vocabulary
parallelism v is a rank's part: `reduce` gives its own log-sum-exp, the ranks merge theirs, and
`gradient` gets the merged one. Between the two calls the tile belongs to the pair that was called.

There are two pairs of functions. `IN_PLACE`, for the CPU, takes one exponential a logit: `reduce`
leaves the softmax over the rank's part, a few rows at a time so that a row stays in cache over the
five passes, and `gradient` rescales it if necessary. `compiled` reads the tile once for `reduce`
(an online softmax) and reads and writes it once for `gradient`, which takes the exponential again,
since memory traffic dominates on a GPU. Both compute in fp32 (float64 for float64) for any dtype.

`accumulate` adds the weight's gradient of a tile to an fp32 sum, from operands in any dtype.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from custom_modules.dtypes import accumulation_dtype

BLOCK_BYTES = 4 * 2**20
"""Bytes of rows that the CPU takes through all passes together: two cores' L2 caches."""


class LogitGradient(NamedTuple):
    """The gradient of a token's loss with respect to its logits, as numbers of each row [n]."""

    softmax: Tensor | None
    """Factor of the softmax; None: 1."""
    label: Tensor
    """Subtracted from the label's entry."""
    every: Tensor | None
    """Subtracted from every entry; None: 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """A token's loss as a function of its logits."""

    vocabulary: int
    """V, over all TP ranks, without padding."""
    label_smoothing: float
    z_loss: float

    def losses(self, lse: Tensor, found: Tensor) -> Tensor:
        """Return the losses [n] from the log-sum-exp and the results of `reduce` over all ranks."""
        losses = lse - (1 - self.label_smoothing) * found[1]
        if self.label_smoothing:
            losses = losses - self.label_smoothing / self.vocabulary * found[2]
        return losses + self.z_loss * lse.square() if self.z_loss else losses

    def logit_gradient(self, lse: Tensor, upstream: Tensor | None) -> LogitGradient:
        """Return the gradient of `upstream` (None: 1) times each loss."""
        ones = torch.ones_like(lse) if upstream is None else upstream
        softmax = ones * (1 + 2 * self.z_loss * lse) if self.z_loss else upstream
        every = self.label_smoothing / self.vocabulary * ones if self.label_smoothing else None
        return LogitGradient(softmax, (1 - self.label_smoothing) * ones, every)


@dataclass(frozen=True, slots=True)
class SoftmaxPasses:
    """One pair of functions over a tile."""

    reduce: Callable[[Tensor, Tensor, bool], Tensor]
    """Take logits [n, v], labels [n], and whether to sum; return, [2 or 3, n], the log-sum-exp,
    the label's logit (0 for a label outside [0, v)) and the sum of the logits."""
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor | None, LogitGradient], None]
    """Take the tile, labels, the results of `reduce`, the merged log-sum-exp (None if there is
    nothing to merge), and the slope; leave the gradient in the tile."""


def accumulate(into: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add grad^T x to `into` [v, h], for grad [n, v] and x [n, h]; `into` may have a wider dtype.

    Products of bf16 are added in fp32: by the tensor cores, or on a CPU with fp32 copies.
    """
    if into.dtype == x.dtype:
        torch.addmm(into, grad.t(), x, out=into)
    elif into.is_cuda:
        torch.addmm(into, grad.t(), x, out_dtype=into.dtype, out=into)
    else:
        x = x.to(into.dtype)
        for columns in _blocks(into.shape[0], grad.shape[0] * into.element_size()):
            into[columns].addmm_(grad[:, columns].to(into.dtype).t(), x)


def _blocks(count: int, bytes_of_one: int) -> Iterator[slice]:
    step = max(1, BLOCK_BYTES // bytes_of_one)
    for start in range(0, count, step):
        yield slice(start, start + step)


def _label_logits(logits: Tensor, labels: Tensor) -> Tensor:
    within = (labels >= 0) & (labels < logits.shape[1])
    found = logits.gather(1, labels.where(within, 0)[:, None])[:, 0]
    return found.to(accumulation_dtype(logits.dtype)).where(within, 0)


def _reduce_in_place(logits: Tensor, labels: Tensor, with_sum: bool) -> Tensor:
    dtype = accumulation_dtype(logits.dtype)
    found = logits.new_empty(2 + with_sum, logits.shape[0], dtype=dtype)
    found[1] = _label_logits(logits, labels)
    for rows in _blocks(logits.shape[0], logits.shape[1] * dtype.itemsize):
        block = logits[rows]
        wide = block.to(dtype)  # the block itself if the dtype is the same
        if with_sum:
            found[2, rows] = wide.sum(1)
        peak = wide.amax(1, keepdim=True)
        total = wide.sub_(peak).exp_().sum(1, keepdim=True)
        wide.mul_(total.reciprocal())
        found[0, rows] = (peak + total.log())[:, 0]
        if wide.dtype != block.dtype:
            block.copy_(wide)
    return found


def _gradient_in_place(
    softmax: Tensor, labels: Tensor, own: Tensor, merged: Tensor | None, slope: LogitGradient
) -> None:
    lse = own[0] if merged is None else merged
    at_label = (own[1] - lse).exp()  # in the tile it is rounded, and may be 1 but for that
    if slope.softmax is not None:
        at_label = at_label * slope.softmax
    factor = slope.softmax
    if merged is not None:
        rest = (own[0] - merged).exp()
        factor = rest if factor is None else factor * rest
    if factor is not None:
        softmax.mul_(factor[:, None])
    at_label = at_label - slope.label
    if slope.every is not None:
        softmax.sub_(slope.every[:, None])
        at_label = at_label - slope.every
    within = ((labels >= 0) & (labels < softmax.shape[1])).nonzero()[:, 0]
    softmax[within, labels[within]] = at_label[within].to(softmax.dtype)


IN_PLACE = SoftmaxPasses(_reduce_in_place, _gradient_in_place)


def _reduce(logits: Tensor, labels: Tensor, with_sum: bool) -> Tensor:
    wide = logits.to(accumulation_dtype(logits.dtype))
    peak = wide.amax(1, keepdim=True)
    lse = peak + (wide - peak).exp().sum(1, keepdim=True).log()  # the pattern of an online softmax
    found = [lse[:, 0], _label_logits(logits, labels)]
    return torch.stack([*found, wide.sum(1)] if with_sum else found)


def _gradient(
    logits: Tensor, labels: Tensor, own: Tensor, merged: Tensor | None, slope: LogitGradient
) -> None:
    lse = own[0] if merged is None else merged
    softmax = (logits.to(lse.dtype) - lse[:, None]).exp()
    if slope.softmax is not None:
        softmax = softmax * slope.softmax[:, None]
    if slope.every is not None:
        softmax = softmax - slope.every[:, None]
    at_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    logits.copy_(torch.where(at_label, softmax - slope.label[:, None], softmax))


@cache
def compiled(backend: str = "inductor") -> SoftmaxPasses:
    """Return the pair fused by `torch.compile`, created once for each backend."""
    reduce = torch.compile(_reduce, backend=backend)
    gradient = torch.compile(_gradient, backend=backend)

    def reduce_any(logits: Tensor, labels: Tensor, with_sum: bool) -> Tensor:
        _let_differ([logits, labels], 0)
        return reduce(logits, labels, with_sum)

    def gradient_any(
        logits: Tensor, labels: Tensor, own: Tensor, merged: Tensor | None, slope: LogitGradient
    ) -> None:
        _let_differ([logits, labels, merged, *slope], 0)
        _let_differ([own], 1)
        gradient(logits, labels, own, merged, slope)

    return SoftmaxPasses(reduce_any, gradient_any)


def _let_differ(tensors: Sequence[Tensor | None], rows: int) -> None:
    """Mark the number of rows as dynamic: otherwise the last tile would compile anew."""
    for tensor in tensors:
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, rows)


def passes_for(device: torch.device) -> SoftmaxPasses:
    """Return the pair for a device."""
    return IN_PLACE if device.type == "cpu" else compiled()
