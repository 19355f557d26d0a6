# SPDX-License-Identifier: Apache-2.0
"""RMSNorm as the paper writes it (arXiv 1910.07467)."""

import torch
from torch import Tensor


def rms_norm(t: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return t / sqrt(mean(t^2) + eps) * weight over the last dimension."""
    return t / torch.sqrt((t * t).mean(dim=-1, keepdim=True) + eps) * weight
