# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm that keep their input and nothing else of the sequence's length.

    RMSNorm      out = t / sqrt(mean(t^2) + eps) * w
    LayerNorm    out = (t - mean(t)) / sqrt(mean((t - mean(t))^2) + eps) * w + b

over the last dimension, fp32 inside (float64 for float64), w = weight. With a zero-centered weight
(Megatron's `layernorm_zero_centered_gamma`, Nemotron's "1P") w = 1 + weight, added in fp32: in bf16
a weight below 2^-8 would be lost when added to 1.

Without a fused kernel of PyTorch, a norm is a composite: it keeps one or two whole-sequence buffers
for the backward (in fp32 for bf16) and makes five more there. In that case, on CPU and with a
zero-centered weight, it is computed a tile at a time. Otherwise the fused CUDA kernel keeps only
the input and one or two numbers a token.

These norms are used without Transformer Engine; their parameters have the same names and meaning as
Transformer Engine's.
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from custom_modules.dtypes import accumulation_dtype
from custom_modules.tiling.mlp import TokenFunction, tiled

TILE = 1024
"""Tokens of a tile: large enough for the kernels, small against any long sequence."""


class Norm(nn.Module):
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
        parameters = tuple(self.parameters())  # as of now: the backward runs a tile again

        def norm(tile: Tensor) -> Tensor:
            return self.of_tile(tile, *parameters)

        if t.ndim < 3 or (t.is_cuda and not self.zero_centered):
            return norm(t)
        function = TokenFunction(run=norm, parameters=parameters, ends_layer=False, part=None)
        return tiled(t, function, tile=TILE)

    def of_tile(self, t: Tensor, *parameters: Tensor) -> Tensor:
        """Return any number of tokens [..., h] normalised by these parameters, in their dtype."""
        raise NotImplementedError


class RMSNorm(Norm):
    """`t / sqrt(mean(t^2) + eps) * w` over the last dimension, fp32 inside."""

    def of_tile(self, t: Tensor, *parameters: Tensor) -> Tensor:
        """Return any number of tokens [..., h] normalised by a weight, in their dtype."""
        (weight,) = parameters
        shape = weight.shape
        if not self.zero_centered:
            return nn.functional.rms_norm(t, shape, weight, self.eps)
        wide = accumulation_dtype(t.dtype)
        return nn.functional.rms_norm(t.to(wide), shape, 1 + weight.to(wide), self.eps).to(t.dtype)


class LayerNorm(Norm):
    """`(t - mean) / sqrt(variance + eps) * w + bias` over the last dimension, fp32 inside."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        """Take the arguments by which Megatron-Core builds a norm."""
        super().__init__(config, hidden_size, eps)
        self.bias = _parameter(torch.zeros(hidden_size, dtype=config.params_dtype), config)

    def of_tile(self, t: Tensor, *parameters: Tensor) -> Tensor:
        """Return any number of tokens [..., h] normalised by weight and bias, in their dtype."""
        weight, bias = parameters
        shape = weight.shape
        if t.is_cuda and not self.zero_centered:
            return nn.functional.layer_norm(t, shape, weight, bias, self.eps)
        wide = accumulation_dtype(t.dtype)  # the CPU's kernel sums a bf16 weight's gradient in bf16
        weight, bias = weight.to(wide), bias.to(wide)
        if self.zero_centered:
            weight = 1 + weight
        return nn.functional.layer_norm(t.to(wide), shape, weight, bias, self.eps).to(t.dtype)


NORMS: dict[str, type[Norm]] = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
"""By Megatron's name for `normalization`."""


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
