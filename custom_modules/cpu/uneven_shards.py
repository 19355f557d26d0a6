# SPDX-License-Identifier: Apache-2.0
"""Gather and reduce-scatter of shards of different sizes, which gloo does not have.

Megatron-Core gathers the tokens of an expert over the tensor ranks of that expert, and each of them
has received another number. NCCL takes such shards. Here each is padded to the largest to gather,
and a sum over all ranks is cut to scatter.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from custom_modules.patching import patched

Collective = Callable[..., Tensor]


@contextmanager
def uneven_shards() -> Iterator[None]:
    """Let Megatron-Core gather and scatter shards of different sizes over gloo in this context."""
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    with (
        patched(mappings, "_gather_along_first_dim", _for(gather, gathered)),
        patched(mappings, "_reduce_scatter_along_first_dim", _for(scatter, scattered)),
    ):
        yield


def _for(even: Collective, uneven: Collective) -> Collective:
    """Return a collective that takes the sizes of its shards, if there are any."""

    def either(x: Tensor, group: Any, sizes: Sequence[int] | None = None, *rest: Any) -> Tensor:
        if sizes is None or group.size() == 1:
            return even(x, group, sizes, *rest)
        return uneven(x, group, list(sizes))

    return either


def gathered(x: Tensor, group: dist.ProcessGroup, sizes: list[int]) -> Tensor:
    """Return the shards [sizes[rank], ...] of all ranks one after the other."""
    padded = x.new_zeros((max(sizes), *x.shape[1:]))
    padded[: len(x)] = x
    shards = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(shards, padded, group=group)
    return torch.cat([shard[:size] for shard, size in zip(shards, sizes, strict=True)])


def scattered(x: Tensor, group: dist.ProcessGroup, sizes: list[int]) -> Tensor:
    """Return this rank's shard of the sum over ranks of x [sum of sizes, ...]."""
    whole = x.clone()
    dist.all_reduce(whole, group=group)
    return whole.split(sizes)[group.rank()].contiguous()
