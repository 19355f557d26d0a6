# SPDX-License-Identifier: Apache-2.0
"""The host's documented waits for the device, answered; any other one ends the check.

Fake tensors have no data, so that whatever asks for a value, or for a shape that depends on values,
raises. So do blocking copies to the host here, and synchronizing in `fake_cuda`. The tiled loss
asks twice in a micro-batch (custom_modules/tiling/cross_entropy.py): which tokens count, and
whether all have the same gradient.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from custom_modules.tiling import cross_entropy
from custom_modules.tiling.cross_entropy import TiledLoss, TokenTile


class NoBlockingCopies(TorchDispatchMode):
    """Raises where a tensor of the device is copied to the host and the host waits for it."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator, unless it is such a copy."""
        named = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            target, source, waits = named.get("device"), args[0], not named.get("non_blocking")
        elif func is torch.ops.aten.copy_.default:
            target, source = args[0].device, args[1]
            waits = not (args[2] if len(args) > 2 else named.get("non_blocking", False))
        else:
            return func(*args, **named)
        if waits and source.device.type == "cuda" and torch.device(target or "cuda").type == "cpu":
            raise AssertionError("the host waits for the device: a blocking copy of a tensor")
        return func(*args, **named)


@contextmanager
def answered() -> Iterator[list[str]]:
    """Answer as if all tokens counted, with one gradient; give the waits in their order."""
    waits: list[str] = []
    real = cross_entropy.split_into_tiles

    def all_count(counted: Tensor, tile: int, shards: int, rank: int) -> list[TokenTile]:
        waits.append("tokens of the tiles")
        with unset_fake_temporarily():
            tiles = real(torch.ones(len(counted), dtype=torch.bool), tile, shards, rank)
        return [
            TokenTile(_fake(one.rows, counted), _fake(one.tokens, counted), one.counts)
            for one in tiles
        ]

    def uniform(self: TiledLoss, upstream: Tensor, counted: Tensor) -> Tensor:
        waits.append("one gradient for all")
        return upstream.new_ones(())

    with (
        mock.patch.object(cross_entropy, "split_into_tiles", all_count),
        mock.patch.object(TiledLoss, "uniform_upstream", uniform),
        NoBlockingCopies(),
    ):
        yield waits


def _fake(indices: Tensor, like: Tensor) -> Tensor:
    return torch.empty(len(indices), dtype=torch.int64, device=like.device)
