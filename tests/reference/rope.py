# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding straight from its formula: complex numbers, and exact angles."""

import math
from decimal import Decimal, localcontext

import torch
from torch import Tensor

PI = Decimal("3.14159265358979323846264338327950288419716939937510")


def exact_angle(position: int, base: int, dimension: int, head_dim: int) -> float:
    """Return position * base ** (-2 * dimension / head_dim) modulo a turn, from 50 digits."""
    with localcontext() as context:
        context.prec = 50
        angle = position * Decimal(base) ** (Decimal(-2 * dimension) / Decimal(head_dim))
        return float(angle % (2 * PI))


def rope_table(position_ids: Tensor, base: float, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float64 [b, s, D/2], for positions [b, s]; small positions only."""
    cos = torch.empty(*position_ids.shape, head_dim // 2, dtype=torch.float64)
    sin = torch.empty_like(cos)
    for row, positions in enumerate(position_ids.tolist()):
        for column, position in enumerate(positions):
            for dimension in range(head_dim // 2):
                angle = position / base ** (2 * dimension / head_dim)
                cos[row, column, dimension] = math.cos(angle)
                sin[row, column, dimension] = math.sin(angle)
    return cos, sin


def rotated(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `t` [s, b, h, D] with each pair (i, i + D/2) multiplied by cos + i sin."""
    half = t.shape[-1] // 2
    turned = torch.complex(t[..., :half], t[..., half:]) * torch.complex(cos, sin)
    return torch.cat((turned.real, turned.imag), dim=-1)
