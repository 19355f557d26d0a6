# SPDX-License-Identifier: Apache-2.0
"""Facts of one model."""

import shlex
from dataclasses import dataclass, replace

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.layers import LayerPattern
from recipes.spec.families import FAMILIES, Family

_WITH_EXPERTS = " or ".join(family.name for family in FAMILIES.values() if family.experts)


def rope_trained_at(rope: RopeScaling, context: int) -> RopeScaling:
    """Return a rotation for a native context that a user states, in tokens.

    The original length of `linear` follows, since its frequencies do not depend on it.
    """
    if rope.method != "linear":
        return rope
    return replace(rope, original_length=max(1, round(context / rope.factor)))


def context_notes(context: int, others: tuple[int, ...]) -> list[str]:
    """Return what a user should know where a config.json can be read as other native contexts."""
    if not others:
        return []
    said = " or ".join(f"{length:,}" for length in others)
    return [
        f"by its config.json the model was trained at {context:,} tokens or at {said}, and "
        f"{context:,} is taken; state what it was trained at by --native-context of import, rope, "
        "plan and ladders new, or as native_context of a ladder"
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """Shape, vocabulary, native context and the model's names in other libraries."""

    name: str
    family: str = "llama"
    """Name in `recipes.spec.families`."""
    layers: int
    hidden: int
    ffn_hidden: int
    """Inner width of the MLP, or of one expert."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    """Rows of the embedding before padding for tensor parallelism."""
    experts: int = 0
    """Experts per layer; 0 in a family without them."""
    experts_per_token: int = 0
    tied_embeddings: bool
    norm_epsilon: float
    init_std: float
    native_context: int
    """Context length in tokens that the published weights were trained for."""
    config_contexts: tuple[int, ...] = ()
    """Other values of `max_position_embeddings` in revisions of the published config.json."""
    other_contexts: tuple[int, ...] = ()
    """Other native contexts that its config.json can be read as; none if the user states it."""
    stated_context: int | None = None
    """The native context, if the user stated it."""
    config_notes: tuple[str, ...] = ()
    """Other doubts about the reading of its config.json, a sentence each."""
    native_rope: RopeScaling
    pattern: LayerPattern | None = None
    """Which layers have a window, another rotation or none; None: all are alike."""
    config_class: str | None = None
    """Dotted name of NeMo's config class of this model; None if NeMo has none."""
    hf_id: str | None
    """Hugging Face repository of weights and tokenizer; None if none are published."""
    hf_revision: str = ""
    """Branch of that repository; empty for its main one."""
    source: str
    path: str = ""
    """Folder that it was read from, as a command named it; empty for a shipped card."""
    start: str = ""
    """Folder of its import to start from; empty for `models/<name>`."""

    def __post_init__(self) -> None:
        """Raise ValueError for a shape that is impossible in general or in the family."""
        if self.family not in FAMILIES:
            raise ValueError(
                f"{self.name}: family {self.family!r} is unknown; there are {', '.join(FAMILIES)}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.name}: {self.heads} heads do not divide into {self.kv_heads} KV heads"
            )
        self._require_pattern()
        if self.facts.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"{self.name}: {self.experts_per_token} experts per token of {self.experts}; "
                f"{self.family} needs at least one per token, and at most as many as there are"
            )
        if not self.facts.experts and (self.experts or self.experts_per_token):
            raise ValueError(
                f"{self.name}: {self.experts} experts, {self.experts_per_token} per token, but "
                f"family {self.family} has none; leave both 0, or take {_WITH_EXPERTS}"
            )

    def _require_pattern(self) -> None:
        pattern = self.pattern
        if pattern is None:
            return
        if not self.facts.patterned:
            with_one = " or ".join(family.name for family in FAMILIES.values() if family.patterned)
            raise ValueError(
                f"{self.name}: layers that differ ({pattern.describe()}), which {self.family} does "
                f"not have; leave the pattern out, or take {with_one}"
            )
        windowed = pattern.window is not None and pattern.local_rope is not None
        if self.facts.windowed and not (windowed and pattern.full_rotates):
            raise ValueError(
                f"{self.name}: the local layers of {self.family} have a window and a local_rope, "
                f"and its full layers rotate; its pattern is {pattern.describe()}"
            )
        if not self.facts.windowed and (pattern.window or pattern.local_rope):
            raise ValueError(
                f"{self.name}: layers of {self.family} have no window and no rotation of their "
                f"own; its pattern is {pattern.describe()}"
            )
        if pattern.every > self.layers:
            raise ValueError(
                f"{self.name}: the pattern has a full layer after every {pattern.every}, and there "
                f"are {self.layers} layers; every is at most {self.layers}"
            )
        own = pattern.local_rope
        for name in () if own is None else ("partial_rotary_factor", "interleaved"):
            if getattr(own, name) != getattr(self.native_rope, name):
                raise ValueError(
                    f"{self.name}: {name} is {getattr(self.native_rope, name)} and in local layers "
                    f"{getattr(own, name)}; it is one fact of the model"
                )

    @property
    def word(self) -> str:
        """Value of `--card` that names it, quoted for a shell."""
        return shlex.quote(self.path) if self.path else self.name

    def trained_at(self, context: int | None) -> "ModelCard":
        """Return the card with the native context that a user states, in tokens; None: as it is."""
        if context is None:
            return self
        return replace(
            self,
            native_context=context,
            native_rope=rope_trained_at(self.native_rope, context),
            other_contexts=(),
            stated_context=context,
        )

    @property
    def notes(self) -> list[str]:
        """What a user should know of the reading of its config.json, a sentence each."""
        return [*self.config_notes, *context_notes(self.native_context, self.other_contexts)]

    @property
    def facts(self) -> Family:
        """The model's family."""
        return FAMILIES[self.family]

    @property
    def matmul_parameters(self) -> int:
        """Weights in the matrix products of one token.

        Includes the LM head, the router and the experts that a token is sent to, not the embedding.
        """
        return self._matrices(self.experts_per_token)

    @property
    def parameters(self) -> int:
        """All weights, as published: matrices, embedding, biases and norms."""
        embedding = 0 if self.tied_embeddings else self.hidden * self.vocab
        norm = self.hidden * (2 if self.facts.normalization == "LayerNorm" else 1)
        biases = self.head_dim * (self.heads + 2 * self.kv_heads) if self.facts.qkv_bias else 0
        norms = 2 * norm * (self.facts.pre_norm + self.facts.post_norm)
        vectors = self.layers * (norms + biases + self.qk_norm_weights) + norm
        return self._matrices(self.experts) + embedding + vectors

    @property
    def qk_norm_weights(self) -> int:
        """Weights of a layer's norms of queries and keys."""
        if not self.facts.qk_norm:
            return 0
        return self.head_dim * (self.heads + self.kv_heads if self.facts.wide_qk_norm else 2)

    def attended_length(self, seq_length: float) -> float:
        """Return the sum over layers of the sequence length whose causal attention does their work.

        `layers * seq_length` unless some layers have a window.
        """
        if self.pattern is None:
            return self.layers * seq_length
        return self.pattern.attended_length(seq_length, self.layers)

    def _matrices(self, experts: int) -> int:
        """Return the number of weights in matrices, counting `experts` experts."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = (3 if self.facts.gated else 2) * self.hidden * self.ffn_hidden
        if self.facts.experts:
            mlp = experts * mlp + self.experts * self.hidden
        return self.layers * (attention + mlp) + self.hidden * self.vocab

    def flops_per_token(self, seq_length: int) -> int:
        """Model FLOPs per trained token, causal, no recompute: `6 P_mm + 6 L (H D) S`.

        In layers with a window S is `attended_length`'s.
        """
        attention = self.heads * self.head_dim * self.attended_length(seq_length)
        return 6 * (self.matmul_parameters + round(attention))
