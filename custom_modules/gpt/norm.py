# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm that keep their input and nothing else of the sequence's length.

    RMSNorm      out = t / sqrt(mean(t^2) + eps) * w
    LayerNorm    out = (t - mean(t)) / sqrt(mean((t - mean(t))^2) + eps) * w + b

over the last dimension, fp32 inside (float64 for float64), w = weight. With a zero-centered weight
(Megatron's `layernorm_zero_centered_gamma`, Nemotron's "1P") w = 1 + weight, added in fp32: in bf16
a weight below 2^-8 would be lost when added to 1.

Without a fused kernel of PyTorch, a norm is a composite: it keeps one or two whole-sequence buffers
for the backward (in fp32 for bf16) and makes five more there. In that case, on CPU and with a
zero-centered weight, forward and backward are written out and go over tiles of tokens, so both hold
a few buffers of a tile. With n = 1 / sqrt(mean(t^2) + eps), g the gradient of out and h the width,
RMSNorm's backward is

    dt = n * (g * w) - t * n^3 * ((g * t) @ w) / h        dw = sum over tokens of n * (g * t)

and n is computed again. LayerNorm's takes PyTorch's kernel a tile at a time. Otherwise the fused
CUDA kernel keeps only the input and one or two numbers a token.

These norms are used without Transformer Engine; their parameters have the same names and meaning as
Transformer Engine's.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from custom_modules.dtypes import accumulation_dtype
from custom_modules.memory.recompute import refuse_autocast

TILE = 1024
"""Tokens of a tile: large enough for the kernels, small against any long sequence."""


class Norm(nn.Module, ABC):
    """Common part of the norms: weight, tiles, and the dtype of the computation."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        """Take the arguments by which Megatron-Core builds a norm."""
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.zero_centered else torch.ones
        self.weight = _parameter(start(hidden_size, dtype=config.params_dtype), config)

    def forward(self, t: Tensor) -> Tensor:
        """Return `t` [s, b, ..., h] normalised, in its dtype."""
        if t.ndim < 2:
            raise ValueError(f"norm of {list(t.shape)}; it needs tokens [s, ..., h]")
        if t.is_cuda and not self.zero_centered:
            return self.fused(t)
        refuse_autocast(t)
        out: Tensor = _Tiled.apply(t, self, *self._parameters.values())
        return out

    @abstractmethod
    def fused(self, t: Tensor) -> Tensor:
        """Return `t` [..., h] normalised by PyTorch's own operator."""

    @abstractmethod
    def write(self, out: Tensor, t: Tensor, *parameters: Tensor) -> None:
        """Normalise tokens `t` [..., h] by these parameters, all wide, into `out`."""

    @abstractmethod
    def write_gradient(
        self, dt: Tensor, grad: Tensor, t: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """Write the gradient of `t` for `grad` of the output; return those of the parameters."""

    def wide(self, dtype: torch.dtype, weight: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
        """Return the factor and what is added, in the dtype of the computation."""
        factor = weight.to(dtype)
        return (1 + factor if self.zero_centered else factor, *(b.to(dtype) for b in bias))


class RMSNorm(Norm):
    """`t / sqrt(mean(t^2) + eps) * w` over the last dimension, fp32 inside."""

    def fused(self, t: Tensor) -> Tensor:
        """Return `t` [..., h] normalised by PyTorch's own operator."""
        return nn.functional.rms_norm(t, self.weight.shape, self.weight, self.eps)

    def write(self, out: Tensor, t: Tensor, *parameters: Tensor) -> None:
        """Normalise tokens `t` [..., h] by a weight into `out`."""
        (weight,) = parameters
        torch.mul(t * self._inverse_norm(t), weight, out=out)

    def write_gradient(
        self, dt: Tensor, grad: Tensor, t: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """Write the gradient of `t` for `grad` of the output; return that of the weight."""
        (weight,) = parameters
        inverse, product = self._inverse_norm(t), grad * t
        slope = (product @ weight).unsqueeze(-1).mul_(inverse.pow(3))
        straight = (grad * weight).mul_(inverse)
        torch.addcmul(straight, t, slope, value=-1 / t.shape[-1], out=dt)
        return (inverse.flatten() @ product.flatten(0, -2),)

    def _inverse_norm(self, t: Tensor) -> Tensor:
        """Return 1 / sqrt(mean(t^2) + eps), [..., 1]."""
        length = torch.linalg.vector_norm(t, dim=-1, keepdim=True)  # writes no t^2
        return length.square_().div_(t.shape[-1]).add_(self.eps).rsqrt_()


class LayerNorm(Norm):
    """`(t - mean) / sqrt(variance + eps) * w + bias` over the last dimension, fp32 inside."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        """Take the arguments by which Megatron-Core builds a norm."""
        super().__init__(config, hidden_size, eps)
        self.bias = _parameter(torch.zeros(hidden_size, dtype=config.params_dtype), config)

    def fused(self, t: Tensor) -> Tensor:
        """Return `t` [..., h] normalised by PyTorch's own operator."""
        return nn.functional.layer_norm(t, self.weight.shape, self.weight, self.bias, self.eps)

    def write(self, out: Tensor, t: Tensor, *parameters: Tensor) -> None:
        """Normalise tokens `t` [..., h] by weight and bias into `out`."""
        weight, bias = parameters
        out.copy_(nn.functional.layer_norm(t, weight.shape, weight, bias, self.eps))

    def write_gradient(
        self, dt: Tensor, grad: Tensor, t: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """Write the gradient of `t` for `grad` of the output; return those of weight and bias."""
        weight, bias = parameters
        variance, mean = torch.var_mean(t, dim=-1, correction=0, keepdim=True)
        inverse = variance.add_(self.eps).rsqrt_()
        of_t, *of_parameters = torch.ops.aten.native_layer_norm_backward(
            grad, t, weight.shape, mean, inverse, weight, bias, [True, True, True]
        )
        dt.copy_(of_t)
        return tuple(of_parameters)


NORMS: dict[str, type[Norm]] = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
"""By Megatron's name for `normalization`."""


class _Tiled(torch.autograd.Function):
    """A norm of t [s, b, ..., h] over tiles of s; saves t and the parameters."""

    @staticmethod
    def forward(ctx, t: Tensor, norm: Norm, *parameters: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.norm, ctx.dtype = norm, accumulation_dtype(t.dtype)
        ctx.save_for_backward(t, *parameters)
        wide, out = norm.wide(ctx.dtype, *parameters), torch.empty_like(t)
        for tile, of_out in tiles(t, out):
            norm.write(of_out, tile.to(ctx.dtype), *wide)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        t, *parameters = ctx.saved_tensors
        wide = ctx.norm.wide(ctx.dtype, *parameters)
        dt = torch.empty_like(t)
        sums: Sequence[Tensor] = ()
        for of_grad, tile, of_dt in tiles(grad, t, dt):
            inputs = of_grad.to(ctx.dtype), tile.to(ctx.dtype)
            found = ctx.norm.write_gradient(of_dt, *inputs, *wide)
            sums = [a.add_(b) for a, b in zip(sums, found, strict=True)] if sums else found
        return dt, None, *(s.type_as(p) for s, p in zip(sums, parameters, strict=True))


def tiles(*tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """Yield views of at most TILE tokens of each, or one entry of the first dimension."""
    shape = tensors[0].shape
    rows = max(1, TILE // max(1, shape[1] if len(shape) > 2 else 1))
    if shape[0] <= rows:
        return iter([tensors])
    return zip(*(t.split(rows) for t in tensors), strict=True)


def norm_of(config: TransformerConfig) -> type[Norm]:
    """Return the norm of a config; raise ValueError for an unsupported one."""
    if config.normalization not in NORMS:
        raise ValueError(
            f"normalization is {config.normalization!r}; long-context layers have "
            f"{' or '.join(NORMS)}"
        )
    return NORMS[config.normalization]


def _parameter(start: Tensor, config: TransformerConfig) -> nn.Parameter:
    """Return a parameter whose gradient Megatron sums over TP if tokens are sharded over it."""
    parameter = nn.Parameter(start)
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter
