# SPDX-License-Identifier: Apache-2.0
"""The workload to plan: a model, the numbers of a stage, and a layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from custom_modules.context_parallel.config import Degrees, degrees
from custom_modules.context_parallel.cost import AttentionShape
from custom_modules.gpt.vocabulary import padded_vocabulary
from recipes.planner.documents import DocumentLengths
from recipes.spec import pipeline
from recipes.spec.layout import Layout
from recipes.spec.model_card import ModelCard

FULLEST_EXPERTS = 1.25
"""Tokens of the EP rank that gets most, over the average: an assumption. Routers are trained to
spread tokens evenly over the batch, not over each micro-batch and layer."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One stage of one model under one layout; the properties are sizes on one rank."""

    card: ModelCard
    seq_length: int
    tokens_per_batch: int
    layout: Layout
    gpus_per_node: int
    """Per node as the scheduler counts it."""
    documents: DocumentLengths | None = None
    """Lengths of the documents that attention stays within; None: it is over whole sequences."""

    @cached_property
    def degrees(self) -> Degrees:
        """Degrees of context parallelism; raises ValueError if the kind does not fit."""
        tp = self.layout.tp
        return degrees(
            self.layout.cp.how,
            size=self.layout.cp.size,
            heads=self.card.heads // tp,
            kv_heads=self.card.kv_heads // tp,
            head_dim=self.card.head_dim,
            seq_length=self.seq_length,
            ranks_per_link=max(1, self.gpus_per_node // tp),
            chunks=not self.card.facts.wide_qk_norm,
        )

    @property
    def element_bytes(self) -> int:
        """Bytes per number in the model's dtype."""
        return 4 if self.layout.precision == "fp32" else 2

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch that a TP group holds: the sequence over CP."""
        return self.seq_length // self.layout.cp.size * self.layout.micro_batch

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step on each data rank."""
        per_round = self.seq_length * self.layout.micro_batch * self.layout.dp
        return self.tokens_per_batch // per_round

    @property
    def stages(self) -> tuple[Sequence[int], ...]:
        """Layers of each pipeline stage, by number from 1."""
        return pipeline.stages(self.card.layers, self.layout.pp, self.layout.vpp)

    def in_fp8(self, number: int) -> bool:
        """Whether layer `number`, from 1, computes its linear layers in FP8."""
        fp8 = self.layout.fp8
        last = self.card.layers - fp8.bf16_last
        return fp8.recipe != "none" and fp8.bf16_first < number <= last

    def chunks_in_flight(self, stage: int) -> int:
        """Most chunks of a pipeline stage that wait for their backward at a time."""
        layout = self.layout
        return pipeline.chunks_in_flight(layout.pp, layout.vpp, stage, self.micro_batches)

    @property
    def unlike(self) -> tuple[int, ...]:
        """One pipeline stage of each kind: first, last, and one between if it has more layers."""
        pp, vpp = self.layout.pp, self.layout.vpp
        between = (1,) if pp > 2 and pipeline.is_uneven(self.card.layers, pp, vpp) else ()
        return (0, *between, pp - 1) if pp > 1 else (0,)

    def most(self, of_stage: Callable[[int], float]) -> float:
        """Return the largest value of any pipeline stage."""
        return max(map(of_stage, self.unlike))

    @property
    def window(self) -> int | None:
        """Tokens that a token of a local layer attends to; None if all layers are full."""
        pattern = self.card.pattern
        if pattern is None or pattern.window is None or pattern.window >= self.seq_length:
            return None
        return pattern.window

    def windowed(self, numbers: Sequence[int]) -> int:
        """Return how many of the layers with these numbers attend within a window."""
        pattern = self.card.pattern
        if pattern is None or self.window is None:
            return 0
        return sum(not pattern.is_full(number) for number in numbers)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters, but for experts, and share the optimizer's state."""
        return self.layout.dp * self.layout.cp.size

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts and share the state of their optimizer."""
        return self.replicas * self.layout.tp // (self.layout.expert_tp * self.layout.ep)

    @cached_property
    def attention(self) -> AttentionShape:
        """Shape of the attention of one layer."""
        return AttentionShape(
            degrees=self.degrees,
            heads=self.card.heads // self.layout.tp,
            kv_heads=self.card.kv_heads // self.layout.tp,
            head_dim=self.card.head_dim,
            tokens=self.seq_length // self.layout.cp.size,
            batch=self.layout.micro_batch,
            element_bytes=self.element_bytes,
        )

    @cached_property
    def layer_weights(self) -> float:
        """Parameters of one layer on a rank; norms are whole on each TP rank."""
        return self.dense_weights + self.expert_weights

    @property
    def qkv_weights(self) -> float:
        """Parameters of one layer's QKV projection on a rank, without a bias."""
        card = self.card
        rows = (card.heads + 2 * card.kv_heads) * card.head_dim
        return card.hidden * rows / self.layout.tp

    @cached_property
    def expert_weights(self) -> float:
        """Parameters of one layer's experts on a rank; 0 for a model without experts."""
        if not self.card.facts.experts:
            return 0.0
        ranks = self.layout.expert_tp * self.layout.ep
        return self.card.experts * self._mlp_weights / ranks

    @property
    def fullest_experts(self) -> float:
        """Tokens of the rank whose experts get most, over the average."""
        return FULLEST_EXPERTS if self.layout.ep > 1 else 1.0

    @cached_property
    def dense_weights(self) -> float:
        """Parameters of one layer on a rank without its experts."""
        card, tp = self.card, self.layout.tp
        attention = card.hidden * card.head_dim * 2 * (card.heads + card.kv_heads)
        if card.facts.qkv_bias:
            attention += card.head_dim * (card.heads + 2 * card.kv_heads)
        norms: float = 2 * (card.facts.pre_norm + card.facts.post_norm) * self._norm_weights
        norms += card.qk_norm_weights / (tp if card.facts.wide_qk_norm else 1)
        if not card.facts.experts:
            return (attention + self._mlp_weights) / tp + norms
        return attention / tp + norms + card.experts * card.hidden  # of the router

    @property
    def _norm_weights(self) -> int:
        return self.card.hidden * (2 if self.card.facts.normalization == "LayerNorm" else 1)

    @property
    def _mlp_weights(self) -> int:
        return (3 if self.card.facts.gated else 2) * self.card.hidden * self.card.ffn_hidden

    @property
    def vocabulary_rows(self) -> float:
        """Rows of the embedding, or of the LM head, on a rank, with those that pad it."""
        return padded_vocabulary(self.card.vocab, self.layout.tp) / self.layout.tp

    @property
    def vocabulary_weights(self) -> float:
        """Parameters of the embedding, or of the LM head, on a rank."""
        return self.vocabulary_rows * self.card.hidden

    def weights(self, stage: int) -> float:
        """Parameters of a pipeline stage, by number from 0, on a rank."""
        first, last = stage == 0, stage == self.layout.pp - 1
        ends = self.vocabulary_weights * (first + last)
        if first and last and self.card.tied_embeddings:
            ends /= 2
        layers = len(self.stages[stage])
        return layers * self.layer_weights + ends + last * self._norm_weights

    def shard(self, stage: int) -> float:
        """Parameters of a stage whose optimizer state a rank has if the ranks share it."""
        experts = len(self.stages[stage]) * self.expert_weights
        return (self.weights(stage) - experts) / self.replicas + experts / self.expert_replicas
