# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs of a step, for three kinds of model FLOPs utilization (MFU).

A token costs 6 FLOPs for each weight that it is multiplied by, forward and backward; recomputation
is not counted. Attention to the tokens before it costs 6 L (H D) for each of the S tokens of a
causal sequence (12 for the S / 2 that a token sees on average). For a step of T tokens:

    causal      6 P T + 6 L (H D) S T                 P: weights in matrix products
    documents   6 P T' + 6 L (H D) sum of l^2         T': T without padding, l: tokens of a document
    6N          6 N T                                 N: P and the embedding

In layers with a window of W tokens, 2 W S - W^2 is in place of S^2, and for a document of more than
W tokens 2 W l - W^2 in place of l^2.

Causal and 6N figures are those that publications state; with attention within documents the kernels
do the work of the second one only. Palm (arXiv 2204.02311, appendix B) defines MFU.
"""

from dataclasses import dataclass
from typing import Any

from custom_modules.rope.layers import LayerPattern


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """What the FLOPs of a step follow from."""

    matmul_parameters: float
    """Weights in the matrix products of one token, with the LM head and without the embedding."""
    embedding_parameters: float
    """Of the embedding table; 0 if the LM head is the same one."""
    attention: float
    """FLOPs for each squared token of a causal sequence: 6 L (H D), L without a window."""
    attention_in_window: float = 0.0
    """The same of layers with a window."""

    @classmethod
    def of(
        cls,
        config: Any,
        *,
        flops_per_token: float,
        seq_length: int,
        pattern: LayerPattern | None = None,
    ) -> "ModelFlops":
        """Return those of a Megatron-Core config whose causal FLOPs per token are known."""
        layers = config.num_layers
        each = 6.0 * config.num_attention_heads * config.kv_channels
        windowed, attended = 0, float(layers * seq_length)
        if pattern is not None and pattern.window is not None:
            windowed = layers - pattern.full_layers(layers)
            attended = pattern.attended_length(seq_length, layers)
        tied = config.share_embeddings_and_output_weights
        return cls(
            matmul_parameters=(flops_per_token - each * attended) / 6,
            embedding_parameters=0.0 if tied else float(config.vocab_size * config.hidden_size),
            attention=each * (layers - windowed),
            attention_in_window=each * windowed,
        )

    def documents(
        self, *, tokens: float, sum_squared_lengths: float, in_window: float | None = None
    ) -> float | None:
        """Return the FLOPs of a step whose tokens attend within their documents.

        `in_window` is the sum of squares in layers with a window; None if it is not known, and then
        of a model with such layers the result.
        """
        if in_window is None and self.attention_in_window:
            return None
        local = self.attention_in_window * (in_window or 0.0)
        return 6 * self.matmul_parameters * tokens + self.attention * sum_squared_lengths + local

    def six_n(self, tokens: float) -> float:
        """Return 6 FLOPs for each weight and token."""
        return 6 * (self.matmul_parameters + self.embedding_parameters) * tokens
