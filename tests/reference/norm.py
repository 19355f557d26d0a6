# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm as their papers write them (arXiv 1910.07467, 1607.06450)."""

import torch
from torch import Tensor


def rms_norm(t: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return t / sqrt(mean(t^2) + eps) * weight over the last dimension."""
    return t / torch.sqrt((t * t).mean(dim=-1, keepdim=True) + eps) * weight


def layer_norm(t: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return (t - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""
    centered = t - t.mean(dim=-1, keepdim=True)
    return rms_norm(centered, weight, eps) + bias
