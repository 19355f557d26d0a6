# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism with sequence parallelism: gather and reduce-scatter over its ranks."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel:
    """Distribution of x over the ranks of a TP group."""

    group: dist.ProcessGroup | None
    """None: one rank."""
    sequence_parallel: bool
    """Whether each rank holds a part of the tokens of x; else each holds all of them."""

    def gather(self, x: Tensor) -> Tensor:
        """Return all tokens [s, b, hidden] of x."""
        if self.group is None or not self.sequence_parallel:
            return x
        whole = x.new_empty(x.shape[0] * dist.get_world_size(self.group), *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=self.group)
        return whole

    def reduce(self, grad: Tensor) -> Tensor:
        """Return the gradient of x from each rank's share of it for all tokens."""
        if self.group is None:
            return grad
        if not self.sequence_parallel:
            dist.all_reduce(grad, group=self.group)
            return grad
        part = grad.new_empty(grad.shape[0] // dist.get_world_size(self.group), *grad.shape[1:])
        dist.reduce_scatter_tensor(part, grad, group=self.group)
        return part
