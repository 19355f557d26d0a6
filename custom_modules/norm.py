# SPDX-License-Identifier: Apache-2.0
"""RMSNorm that keeps its input and nothing else of the sequence's length.

    out = t / sqrt(mean(t^2) + eps) * weight        over the last dimension, fp32 inside

Where PyTorch has no fused kernel for it (CPU), `rms_norm` is a composite: it keeps one or two
whole-sequence buffers for the backward (in fp32 for bf16) and makes five more there. There it is
taken a tile at a time; on CUDA the fused kernel keeps the input and one number a token by itself.
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from custom_modules.tiled_mlp import TokenFunction, tiled

TILE = 1024
"""Tokens of a tile: large enough for the kernels, small against any long sequence."""


class RMSNorm(nn.Module):
    """`t / sqrt(mean(t^2) + eps) * weight` over the last dimension, fp32 inside."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        """Take the arguments by which Megatron-Core builds a norm."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each TP rank sees a part of the sequence: Megatron sums this weight's gradient over TP.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, t: Tensor) -> Tensor:
        """Return `t` [s, b, ..., h] normalised, in its dtype."""
        weight = self.weight

        def norm(tile: Tensor) -> Tensor:
            return nn.functional.rms_norm(tile, weight.shape, weight, self.eps)

        if t.is_cuda or t.ndim < 3:
            return norm(t)
        function = TokenFunction(run=norm, parameters=(weight,), ends_layer=False, part=None)
        return tiled(t, function, tile=TILE)
