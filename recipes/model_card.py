# SPDX-License-Identifier: Apache-2.0
"""The facts of one model that every later decision needs."""

from dataclasses import dataclass

from custom_modules.rope_scaling import RopeScaling


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """Shape, vocabulary, native context and the names under which others know the model."""

    name: str
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    """Rows of the embedding before padding to a multiple for tensor parallelism."""
    tied_embeddings: bool
    norm_epsilon: float
    init_std: float
    native_context: int
    """Tokens the published weights were trained to attend over."""
    native_rope: RopeScaling
    config_class: str
    """NeMo-side config class by dotted name."""
    hf_id: str | None
    """Hugging Face repository of weights and tokenizer; None for a model trained from scratch."""
    source: str

    def __post_init__(self) -> None:
        """Refuse shapes that no transformer has."""
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.name}: {self.heads} heads do not divide into {self.kv_heads} KV heads"
            )

    @property
    def matmul_parameters(self) -> int:
        """Weights that take part in a matrix product per token: the LM head, not the embedding."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = 3 * self.hidden * self.ffn_hidden
        return self.layers * (attention + mlp) + self.hidden * self.vocab

    def flops_per_token(self, seq_length: int) -> int:
        """Model FLOPs per trained token, causal, no recompute: `6 P_mm + 6 L (H D) S`."""
        attention = self.layers * self.heads * self.head_dim * seq_length
        return 6 * (self.matmul_parameters + attention)
