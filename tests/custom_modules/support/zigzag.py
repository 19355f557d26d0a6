# SPDX-License-Identifier: Apache-2.0
"""Which tokens Megatron gives to each rank, and made-up tensors to give."""

import torch
from torch import Tensor


def shard_of(length: int, rank: int, size: int) -> list[int]:
    """Return the tokens of a rank: the chunks `rank` and 2 * `size` - 1 - `rank`."""
    chunk = length // (2 * size)
    return [c * chunk + i for c in (rank, 2 * size - 1 - rank) for i in range(chunk)]


def made_up(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64):
    """Return a float64 tensor of each shape, the same on every rank, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return [
        here(torch.randn(s, generator=generator, dtype=torch.float64, device="cpu").to(dtype))
        for s in shapes
    ]


def here(t: Tensor) -> Tensor:
    """Return what was drawn on the CPU on the device of this rank."""
    return t.to(torch.get_default_device())


def differences(ours: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Return the largest difference of each of out, dq, dk and dv."""
    names = ("out", "dq", "dk", "dv")
    return {
        name: (a - b).abs().max().item() for name, a, b in zip(names, ours, expected, strict=True)
    }
