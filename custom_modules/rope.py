# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding for the positions a rank holds, exact at millions of positions.

    out[p] = t[p] * cos(p * f) + rotate_half(t[p]) * sin(p * f)

Megatron-Core computes a table for the whole sequence on every rank and casts cos and sin to the
model's dtype. At 4M positions the table is GiBs and bf16 has 8 bits for an angle. Here

1. `inverse_frequencies` gives f in float64 for a `RopeScaling`, with its temperature;
2. `rotary_table` turns position ids [b, s] into cos and sin [s, b, 1, D/2] for just those
   positions: angles in float64, since fp32 holds `position * f` to 1e-7 of its size, which at
   4M radians is a quarter of a turn; results in fp32;
3. `rotate` applies the table in fp32, a tile of the sequence at a time, and returns the dtype of
   its input.

Legend: b batch, s sequence on this rank, h heads on this rank, D head size. Pairs are half-split:
dimension i turns with i + D/2, as in Llama. Memory of a table: 4 * s * b * D bytes.
Position ids may come in any order, so zigzag shards and restarting documents need no special case.

Sources: RoPE arXiv 2104.09864; YaRN arXiv 2309.00071; Llama 3.1 arXiv 2407.21783.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from custom_modules.rope_scaling import RopeScaling

TILE_ELEMENTS = 2**24
"""Elements rotated at a time: bounds the fp32 copies to 64 MiB each, whatever the length."""


def inverse_frequencies(scaling: RopeScaling, head_dim: int) -> tuple[Tensor, float]:
    """Return radians per position, float64 [D/2], and the temperature on cos and sin."""
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotation pairs dimensions, so it must be even")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    plain = scaling.base**-exponents
    if scaling.method == "yarn":
        return _yarn(plain, scaling, head_dim), scaling.temperature
    if scaling.method == "llama3":
        return _llama3(plain, scaling), scaling.temperature
    return plain, scaling.temperature


def _yarn(plain: Tensor, scaling: RopeScaling, head_dim: int) -> Tensor:
    """Interpolate slow dimensions by `factor`, keep fast ones, ramp between (arXiv 2309.00071)."""
    length = scaling.original_length
    assert length is not None

    def dimension_turning(turns: float) -> float:
        """Return the (real-valued) dimension that turns so often within the original length."""
        period = length / (turns * 2 * math.pi)
        return head_dim * math.log(period) / (2 * math.log(scaling.base))

    low = max(math.floor(dimension_turning(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension_turning(scaling.beta_slow)), head_dim - 1)
    width = max(high - low, 0.001)  # a ramp of no width would divide by zero
    dimensions = torch.arange(head_dim // 2, dtype=torch.float64)
    interpolated = ((dimensions - low) / width).clamp(0, 1)
    return plain / scaling.factor * interpolated + plain * (1 - interpolated)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Interpolate wavelengths above the original context, blend the octaves below it."""
    assert scaling.original_length is not None
    wavelength = 2 * math.pi / plain
    turns = scaling.original_length / wavelength
    smooth = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = smooth.clamp(0, 1)
    return plain / scaling.factor * (1 - smooth) + plain * smooth


def rotary_table(
    position_ids: Tensor, frequencies: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, fp32 [s, b, 1, D/2], of the positions [b, s] (integers)."""
    positions = position_ids.t()[:, :, None, None]
    shape = (*positions.shape[:3], len(frequencies))
    cos = torch.empty(shape, dtype=torch.float32, device=position_ids.device)
    sin = torch.empty_like(cos)
    for tile in _tiles(cos):  # float64 for a tile at a time
        angles = positions[tile].double() * frequencies
        cos[tile], sin[tile] = angles.cos() * temperature, angles.sin() * temperature
    return cos, sin


class _Rotate(torch.autograd.Function):
    """Rotation is linear and orthogonal up to the temperature: its gradient turns back.

    Saves cos and sin, which all layers share; nothing of the input.
    """

    @staticmethod
    def forward(ctx, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        return _turn(t, cos, sin, torch.empty_like(t))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin, torch.empty_like(grad)), None, None


def _tiles(t: Tensor) -> Iterator[slice]:
    """Yield slices of the first dimension that hold at most TILE_ELEMENTS, or one entry."""
    entries = max(1, TILE_ELEMENTS // max(1, t[:1].numel()))
    for start in range(0, t.shape[0], entries):
        yield slice(start, start + entries)


def _turn(t: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """Write `t` turned to `out`, which may be `t`, a few tokens at a time."""
    compute = torch.promote_types(t.dtype, torch.float32)
    for tile in _tiles(t):
        first, second = t[tile].to(compute).chunk(2, dim=-1)
        c, s = cos[tile].to(compute), sin[tile].to(compute)
        turned = (first * c).addcmul_(second, s, value=-1), (second * c).addcmul_(first, s)
        for half, value in zip(out[tile].chunk(2, dim=-1), turned, strict=True):
            half.copy_(value)
    return out


def rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `t` [s, b, h, D] turned by the table, in fp32 inside, in the dtype of `t` outside."""
    return _Rotate.apply(t, cos, sin)


def rotate_(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn `t` in place and return it: for tensors outside autograd."""
    return _turn(t, cos, sin, t)
