# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's configuration of a small Llama, whose sizes a benchmark chooses."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


def llama_config(**chosen: Any) -> TransformerConfig:
    """Return a configuration with RMSNorm, SwiGLU, no bias and no dropout, and what is chosen."""
    return TransformerConfig(
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **chosen,
    )
