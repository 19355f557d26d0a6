# SPDX-License-Identifier: Apache-2.0
"""The host's documented waits for the device, answered; any other one ends the check.

Fake tensors have no data, so that whatever asks for a value, or for a shape that depends on values,
raises. The tiled loss asks twice in a micro-batch (custom_modules/tiling/cross_entropy.py): which
tokens count, and whether all have the same gradient.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from custom_modules.tiling import cross_entropy
from custom_modules.tiling.cross_entropy import TiledLoss, TokenTile


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
    ):
        yield waits


def _fake(indices: Tensor, like: Tensor) -> Tensor:
    return torch.empty(len(indices), dtype=torch.int64, device=like.device)
