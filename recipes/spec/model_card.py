# SPDX-License-Identifier: Apache-2.0
"""The facts of one model that every later decision needs."""

from dataclasses import dataclass

from custom_modules.rope.config import RopeScaling
from recipes.spec.families import FAMILIES, Family

_WITH_EXPERTS = " or ".join(family.name for family in FAMILIES.values() if family.experts)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """Shape, vocabulary, native context and the names under which others know the model."""

    name: str
    family: str = "llama"
    """Name in `recipes.spec.families`."""
    layers: int
    hidden: int
    ffn_hidden: int
    """Inner width of the MLP; of one expert where there are experts."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    """Rows of the embedding before padding to a multiple for tensor parallelism."""
    experts: int = 0
    """Of each layer; 0 in a family without them."""
    experts_per_token: int = 0
    tied_embeddings: bool
    norm_epsilon: float
    init_std: float
    native_context: int
    """Tokens the published weights were trained to attend over."""
    config_contexts: tuple[int, ...] = ()
    """What `max_position_embeddings` of the published config.json says, or has said, instead."""
    native_rope: RopeScaling
    config_class: str | None = None
    """NeMo's config class of this model by dotted name; None where NeMo has none."""
    hf_id: str | None
    """Hugging Face repository of weights and tokenizer; None where there are none published."""
    source: str

    def __post_init__(self) -> None:
        """Refuse shapes that no transformer has, or none of the family."""
        if self.family not in FAMILIES:
            raise ValueError(
                f"{self.name}: family {self.family!r} is unknown; there are {', '.join(FAMILIES)}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.name}: {self.heads} heads do not divide into {self.kv_heads} KV heads"
            )

        if self.facts.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"{self.name}: {self.experts_per_token} experts per token of {self.experts}; "
                f"{self.family} takes at least one for each token, and no more than there are"
            )
        if not self.facts.experts and (self.experts or self.experts_per_token):
            raise ValueError(
                f"{self.name}: {self.experts} experts, {self.experts_per_token} per token, and "
                f"family {self.family} has none; leave both 0, or take {_WITH_EXPERTS}"
            )

    @property
    def facts(self) -> Family:
        """What sets the family apart."""
        return FAMILIES[self.family]

    @property
    def matmul_parameters(self) -> int:
        """Weights that take part in a matrix product per token.

        The LM head does, the embedding does not; of experts those do that a token is sent to, and
        the router.
        """
        return self._matrices(self.experts_per_token)

    @property
    def parameters(self) -> int:
        """All weights, as published: matrices, embedding, biases and norms."""
        embedding = 0 if self.tied_embeddings else self.hidden * self.vocab
        norm = self.hidden * (2 if self.facts.normalization == "LayerNorm" else 1)
        biases = self.head_dim * (self.heads + 2 * self.kv_heads) if self.facts.qkv_bias else 0
        qk_norm = 2 * self.head_dim if self.facts.qk_norm else 0
        vectors = self.layers * (2 * norm + biases + qk_norm) + norm
        return self._matrices(self.experts) + embedding + vectors

    def _matrices(self, experts: int) -> int:
        """Return the weights of matrices, of `experts` experts where there are any."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = (3 if self.facts.gated else 2) * self.hidden * self.ffn_hidden
        if self.facts.experts:
            mlp = experts * mlp + self.experts * self.hidden
        return self.layers * (attention + mlp) + self.hidden * self.vocab

    def flops_per_token(self, seq_length: int) -> int:
        """Model FLOPs per trained token, causal, no recompute: `6 P_mm + 6 L (H D) S`."""
        attention = self.layers * self.heads * self.head_dim * seq_length
        return 6 * (self.matmul_parameters + attention)
