# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory without the memory: offload's buffers are fake, and its cap holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from custom_modules.memory.pinned_pool import HostPool


@contextmanager
def fake_host() -> Iterator[None]:
    """Let a machine of any size take offload's buffers in this context."""
    real = HostPool.require

    def require(self: HostPool, size: int, *, ranks: int = 1) -> None:
        self.memory_left = lambda: 2**60
        real(self, size, ranks=ranks)

    def take(self: HostPool, size: int) -> tuple[Tensor, object]:
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        self.require(size)
        self.made_bytes += size
        return torch.empty(size, dtype=torch.uint8, device="cpu"), None

    with (
        mock.patch.object(HostPool, "require", require),
        mock.patch.object(HostPool, "take", take),
    ):
        yield
