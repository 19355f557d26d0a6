# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs of a step, for three kinds of model FLOPs utilization (MFU).

A token costs 6 FLOPs for each weight that it is multiplied by, forward and backward; recomputation
is not counted. Attention to the tokens before it costs 6 L (H D) for each of the S tokens of a
causal sequence (12 for the S / 2 that a token sees on average). For a step of T tokens:

    causal      6 P T + 6 L (H D) S T                 P: weights in matrix products
    documents   6 P T' + 6 L (H D) sum of l^2         T': T without padding, l: tokens of a document
    6N          6 N T                                 N: P and the embedding

Causal and 6N figures are those that publications state; with attention within documents the kernels
do the work of the second one only. Palm (arXiv 2204.02311, appendix B) defines MFU.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """What the FLOPs of a step follow from."""

    matmul_parameters: float
    """Weights in the matrix products of one token, with the LM head and without the embedding."""
    embedding_parameters: float
    """Of the embedding table; 0 if the LM head is the same one."""
    attention: float
    """FLOPs for each squared token of a causal sequence: 6 L (H D)."""

    @classmethod
    def of(cls, config: Any, *, flops_per_token: float, seq_length: int) -> "ModelFlops":
        """Return those of a Megatron-Core config whose causal FLOPs per token are known."""
        attention = 6.0 * config.num_layers * config.num_attention_heads * config.kv_channels
        tied = config.share_embeddings_and_output_weights
        return cls(
            matmul_parameters=(flops_per_token - attention * seq_length) / 6,
            embedding_parameters=0.0 if tied else float(config.vocab_size * config.hidden_size),
            attention=attention,
        )

    def documents(self, *, tokens: float, sum_squared_lengths: float) -> float:
        """Return the FLOPs of a step whose tokens attend within their documents."""
        return 6 * self.matmul_parameters * tokens + self.attention * sum_squared_lengths

    def six_n(self, tokens: float) -> float:
        """Return 6 FLOPs for each weight and token."""
        return 6 * (self.matmul_parameters + self.embedding_parameters) * tokens
