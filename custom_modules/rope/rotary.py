# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding for the positions of a rank, exact at millions of positions.

    out[p] = t[p] * cos(p * f) + rotate_half(t[p]) * sin(p * f)

Megatron-Core computes a table for the whole sequence on every rank and casts cos and sin to the
model's dtype. At 4M positions the table is GiBs and bf16 has 8 bits for an angle. Here

1. `inverse_frequencies` gives f in float64 for a `RopeScaling`, with its temperature;
2. `rotary_table` turns position ids [b, s] into cos and sin [s, b, 1, R/2] for just those
   positions: angles in float64, since fp32 holds `position * f` to 1e-7 of its size, which at
   4M radians is a quarter of a turn; results in fp32;
3. `rotate` applies the table in fp32, a tile of the sequence at a time, and returns the dtype of
   its input; dimensions beyond the first R pass through.

Legend: b batch, s sequence on this rank, h heads on this rank, D head size, R of it rotated (all,
unless `partial_rotary_factor` says less). Pairs are half-split, i with i + R/2 as in Llama, or
interleaved, 2i with 2i + 1. Memory of a table: 4 * s * b * R bytes.
Position ids may come in any order, so zigzag shards and restarting documents need no special case.

The sources of the methods are in `custom_modules.rope.config`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from custom_modules.rope.config import MAX_POSITION, RopeScaling
from custom_modules.rope.in_effect import RotationInEffect
from custom_modules.rope.layers import LayerPattern

TILE_ELEMENTS = 2**24
"""Elements rotated at a time: bounds the fp32 copies to 64 MiB each, whatever the length."""


def inverse_frequencies(
    scaling: RopeScaling, head_dim: int, length: int | None = None
) -> tuple[Tensor, float]:
    """Return radians per position, float64 [R/2], and the temperature on cos and sin.

    `length` is the sequence length in tokens, for the methods that depend on it. Raises ValueError
    if these do not get it, for an odd number of rotated dimensions, and for a wrong number of
    per-dimension factors.
    """
    rotated = rotary_dims(scaling, head_dim)
    if scaling.by_length and length is None:
        raise ValueError(
            f"RoPE method {scaling.method} rotates by the length of the sequence; give length"
        )
    if scaling.before is not None:
        plain, _ = inverse_frequencies(scaling.before, head_dim)
    else:
        exponents = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
        plain = scaling.base**-exponents
    return _stretched(plain, scaling, length), scaling.temperature


def rotary_dims(scaling: RopeScaling, head_dim: int) -> int:
    """Return the number of rotated dimensions of a head; raise ValueError if it is odd."""
    rotated = int(head_dim * scaling.partial_rotary_factor)
    if rotated < 2 or rotated % 2:
        share = scaling.partial_rotary_factor
        raise ValueError(
            f"head_dim is {head_dim}"
            + (f" and partial_rotary_factor {share}, so {rotated} turn" if share != 1 else "")
            + "; rotation pairs dimensions, so it must be even"
        )
    return rotated


def _stretched(plain: Tensor, scaling: RopeScaling, length: int | None) -> Tensor:
    match scaling.method:
        case "default":
            return plain
        case "linear":
            return plain / scaling.factor
        case "ntk":
            return _ntk(plain, scaling.factor)
        case "dynamic":
            assert length is not None
            assert scaling.original_length is not None
            longer = max(length, scaling.original_length) / scaling.original_length
            return _ntk(plain, scaling.factor * longer - (scaling.factor - 1))
        case "yarn" | "ntk_by_parts":
            return _by_parts(plain, scaling)
        case "llama3":
            return _llama3(plain, scaling)
        case "longrope":
            return plain / _divisors(scaling, len(plain), length)


def _ntk(plain: Tensor, factor: float) -> Tensor:
    """Return the frequencies at the base times `factor ** (R / (R - 2))`: the last is divided."""
    if len(plain) < 2:
        raise ValueError("NTK-aware scaling takes at least 4 rotated dimensions, and there are 2")
    share = torch.arange(len(plain), dtype=torch.float64) / (len(plain) - 1)
    return plain * factor**-share


def _by_parts(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Interpolate slow dimensions by `factor`, keep fast ones, ramp between (arXiv 2309.00071)."""
    assert scaling.original_length is not None
    length = scaling.original_length

    def dimension_turning(turns: float) -> float:
        return _dimension_of(2 * math.pi * turns / length, plain, scaling)

    low, high = dimension_turning(scaling.beta_fast), dimension_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(plain) - 1)
    width = high - low if high != low else 0.001  # a ramp of no width would divide by zero
    dimensions = torch.arange(len(plain), dtype=torch.float64)
    interpolated = ((dimensions - low) / width).clamp(0, 1)
    return plain / scaling.factor * interpolated + plain * (1 - interpolated)


def _dimension_of(frequency: float, plain: Tensor, scaling: RopeScaling) -> float:
    """Return the (real-valued) pair of dimensions that rotates at `frequency`.

    The logarithm falls linearly with the pair for plain RoPE; for a rotation that was stretched
    before, it is interpolated between neighbours, and extrapolated from the outermost two.
    """
    if scaling.before is None:
        return -len(plain) * math.log(frequency) / math.log(scaling.base)
    if len(plain) < 2:
        raise ValueError("a rotation that is stretched turns at least 4 dimensions, and this one 2")
    logs, wanted = plain.log().tolist(), math.log(frequency)
    after = next((i for i, value in enumerate(logs) if value < wanted), len(logs) - 1)
    after = max(after, 1)
    return after - (wanted - logs[after]) / (logs[after - 1] - logs[after])


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


def _divisors(scaling: RopeScaling, pairs: int, length: int | None) -> Tensor:
    """Return LongRoPE's factors: short ones up to the original length, long ones above it."""
    assert length is not None
    assert scaling.original_length is not None
    chosen = scaling.long_factor if length > scaling.original_length else scaling.short_factor
    assert chosen is not None
    if len(chosen) != pairs:
        raise ValueError(
            f"longrope has {len(chosen)} factors and {2 * pairs} dimensions of a head turn; it "
            f"takes one a pair, {pairs}"
        )
    return torch.tensor(chosen, dtype=torch.float64)


class Rotation:
    """A `RopeScaling` for heads of one size: tables for the positions that a rank holds."""

    def __init__(self, scaling: RopeScaling, head_dim: int) -> None:
        """Take the rotation; raises ValueError if it does not fit the heads."""
        self.scaling = scaling
        self.head_dim = head_dim
        self._frequencies: dict[tuple[int | None, torch.device], Tensor] = {}
        self.frequencies(scaling.original_length, torch.device("cpu"))

    def table(self, position_ids: Tensor, length: int, frequencies: Tensor | None = None) -> Tensor:
        """Return cos and sin, fp32 [2, s, b, 1, R/2], of positions [b, s].

        They are positions of sequences of `length` tokens over all ranks that share them.
        `frequencies` [R/2] replace the method's own, for example if they vary in training.
        """
        if frequencies is None:
            frequencies = self.frequencies(length, position_ids.device)
        return torch.stack(rotary_table(position_ids, frequencies, self.scaling.temperature))

    def frequencies(self, length: int | None, device: torch.device) -> Tensor:
        """Return what tables are made of: radians per position, float64 [R/2]."""
        key = (length if self.scaling.by_length else None, device)
        if key not in self._frequencies:
            found, _ = inverse_frequencies(self.scaling, self.head_dim, length)
            self._frequencies[key] = found.to(device)
        return self._frequencies[key]

    def in_effect(
        self, length: int, device: torch.device, *, interleaved: bool
    ) -> RotationInEffect:
        """Return what this rotates sequences of `length` tokens by on a device.

        `interleaved` is how the layers pair dimensions.
        """
        return _in_effect(
            lambda at: self.frequencies(at, device).cpu(),
            self.scaling,
            self.head_dim,
            length,
            interleaved=interleaved,
        )


def stated_rotation(
    scaling: RopeScaling, head_dim: int, length: int, pattern: LayerPattern | None = None
) -> RotationInEffect:
    """Return what a `RopeScaling` means for heads of a size and sequences of `length` tokens.

    With a `pattern` it is the rotation of the layers that have none of their own. It is computed
    apart from `Rotation`, since that is compared with it.
    """
    if pattern is not None:
        own = pattern.local_rope
        return replace(
            stated_rotation(scaling, head_dim, length),
            layers=pattern.describe(base=False),
            local=None if own is None else stated_rotation(own, head_dim, length),
        )
    return _in_effect(
        lambda at: inverse_frequencies(scaling, head_dim, at)[0],
        scaling,
        head_dim,
        length,
        interleaved=scaling.interleaved,
    )


def _in_effect(
    frequencies_at: Callable[[int], Tensor],
    scaling: RopeScaling,
    head_dim: int,
    length: int,
    *,
    interleaved: bool,
) -> RotationInEffect:
    above = scaling.original_length if scaling.method == "longrope" else None
    return RotationInEffect(
        frequencies=tuple(frequencies_at(above or length).tolist()),
        temperature=scaling.temperature,
        head_dim=head_dim,
        interleaved=interleaved,
        length=length if scaling.by_length and above is None else None,
        long_frequencies=() if above is None else tuple(frequencies_at(above + 1).tolist()),
        long_above=above,
    )


def rotary_table(
    position_ids: Tensor, frequencies: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, fp32 [s, b, 1, R/2], of the positions [b, s] (integers).

    Raises ValueError for positions on the CPU below 0 or from 2^31 on; a check on a device would
    have to wait for it.
    """
    if position_ids.device.type == "cpu" and position_ids.numel():
        low, high = (int(end) for end in position_ids.aminmax())
        if low < 0 or high >= MAX_POSITION:
            raise ValueError(
                f"positions run from {low:,} to {high:,}; they are rotated from 0 to 2^31 - 1"
            )
    positions = position_ids.t()[:, :, None, None]
    shape = (*positions.shape[:3], len(frequencies))
    cos = torch.empty(shape, dtype=torch.float32, device=position_ids.device)
    sin = torch.empty_like(cos)
    for of_cos, of_sin, of_positions in _tiles(cos, sin, positions):  # float64 for a tile at a time
        angles = of_positions.double() * frequencies
        torch.mul(angles.cos(), temperature, out=of_cos)
        torch.mul(angles.sin_(), temperature, out=of_sin)
    return cos, sin


class _Rotate(torch.autograd.Function):
    """Rotation is linear and orthogonal up to the temperature: its gradient rotates back.

    Saves cos and sin, which all layers share, and not the input.
    """

    @staticmethod
    def forward(ctx, t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turn(t, cos, sin, torch.empty_like(t), interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        turned = _turn(grad, cos, sin, torch.empty_like(grad), ctx.interleaved, back=True)
        return turned, None, None, None


def _tiles(*tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """Yield views of the first dimension, with at most TILE_ELEMENTS of the first, or one entry."""
    shape = tensors[0].shape
    entries = max(1, TILE_ELEMENTS // max(1, math.prod(shape[1:])))
    if shape[0] <= entries:
        return iter([tensors])
    return zip(*(t.split(entries) for t in tensors), strict=True)


def _pairs(t: Tensor, rotated: int, interleaved: bool) -> Sequence[Tensor]:
    """Return views of the paired dimensions, [..., R/2] each."""
    turning = t if rotated == t.shape[-1] else t[..., :rotated]
    return (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)


def _turn(
    t: Tensor, cos: Tensor, sin: Tensor, out: Tensor, interleaved: bool, *, back: bool = False
) -> Tensor:
    """Write the rotated `t` to `out`, which may be `t`, a few tokens at a time."""
    dtype, rotated, sign = t.dtype, 2 * cos.shape[-1], -1 if back else 1
    compute = torch.promote_types(dtype, torch.float32)
    direct = dtype == compute and out is not t  # else halves are read after they are written
    if compute != torch.float32:
        cos, sin = cos.to(compute), sin.to(compute)
    for of_t, of_out, c, s in _tiles(t, out, cos, sin):
        first, second = _pairs(of_t, rotated, interleaved)
        if dtype != compute:
            first, second = first.to(compute), second.to(compute)
        into = _pairs(of_out, rotated, interleaved)
        turned = into if direct else [torch.empty_like(first) for _ in into]
        torch.mul(first, c, out=turned[0]).addcmul_(second, s, value=-sign)
        torch.mul(second, c, out=turned[1]).addcmul_(first, s, value=sign)
        if not direct:
            for half, value in zip(into, turned, strict=True):
                half.copy_(value)
        if out is not t and rotated < t.shape[-1]:
            of_out[..., rotated:] = of_t[..., rotated:]
    return out


def rotate(t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return `t` [s, b, h, D] rotated by the table, in fp32 inside, in the dtype of `t` outside."""
    return _Rotate.apply(t, cos, sin, interleaved)


def rotate_(t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate `t` in place and return it: for tensors outside autograd."""
    return _turn(t, cos, sin, t, interleaved)
