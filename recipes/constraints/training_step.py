# SPDX-License-Identifier: Apache-2.0
"""One optimizer step as numbers: the value that all constraints are functions of.

The planner makes it of a `Workload`, the recipe check of a resolved recipe. Nothing is validated
here, since sizes that do not fit together are what `recipes.constraints` reports.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from custom_modules.context_parallel.config import ContextParallelKind, Degrees, degrees
from custom_modules.memory.config import Offload, Recompute, SavedTensors, Tiling
from custom_modules.rope.layers import LayerPattern
from recipes.spec import pipeline
from recipes.spec.layout import Fp8, Sharding


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """Shape of the model, layout and batch; properties of a rank divide by sizes that fit."""

    seq_length: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn_hidden: int
    layers: int
    pattern: LayerPattern | None = None
    """Which layers differ; None: all are alike."""
    wide_qk_norm: bool = False
    """Whether queries and keys are normalised over all heads of a token at once."""
    vocab: int
    experts: int = 0
    ep: int = 1
    etp: int | None = None
    tp: int = 1
    cp: int = 1
    cp_kind: ContextParallelKind = ContextParallelKind()
    pp: int = 1
    vpp: int = 1
    """Chunks of layers of each pipeline rank."""
    ends_count: bool | None = None
    """Whether embedding and LM head count as a layer each; None: where PP does not divide the
    layers."""
    world_size: int
    """Nodes times ranks per node."""
    ranks_per_node: int
    global_batch: int
    """Sequences of a step, over all ranks."""
    micro_batch: int = 1
    """Sequences of one forward."""
    recompute: Recompute = Recompute()
    tiling: Tiling = Tiling()
    offload: Offload = Offload()
    sharding: Sharding = "optimizer"
    optimizer_offload: float = 0.0
    precision_aware: bool = True
    """Whether the optimizer is Megatron-Core's precision-aware one, if it is offloaded."""
    fp8: Fp8 = Fp8()
    bf16: bool = True
    on_cpu: bool = False
    transformer_engine: bool = True

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tp * self.cp * self.pp

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.world_size // self.model_ranks

    @property
    def expert_tp(self) -> int:
        """Tensor parallel ranks of each expert."""
        return self.tp if self.etp is None else self.etp

    @cached_property
    def degrees(self) -> Degrees:
        """Degrees of context parallelism; raises ValueError if the kind does not fit the heads."""
        return degrees(
            self.cp_kind,
            size=self.cp,
            heads=self.heads // self.tp,
            kv_heads=self.kv_heads // self.tp,
            head_dim=self.head_dim,
            seq_length=self.seq_length,
            ranks_per_link=max(1, self.ranks_per_node // self.tp),
            chunks=not self.wide_qk_norm,
        )

    @property
    def head_chunked(self) -> bool:
        """Whether attention projects a group of heads at a time."""
        return bool(self.degrees.heads_per_stage)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a rank, before sequence parallelism divides them by TP."""
        return self.seq_length // self.cp * self.micro_batch

    @property
    def stages(self) -> tuple[Sequence[int], ...]:
        """Layers of each pipeline stage, by number from 1."""
        return pipeline.stages(self.layers, self.pp, self.vpp)

    @property
    def layers_per_stage(self) -> int:
        """Layers of the fullest pipeline stage."""
        return max(map(len, self.stages))

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on one data-parallel rank."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def saved(self) -> SavedTensors:
        """Sizes of what a layer keeps on a rank."""
        return SavedTensors(
            tokens=self.tokens,
            hidden=self.hidden,
            heads=self.heads // self.tp,
            head_dim=self.head_dim,
            tp=self.tp,
            element_bytes=2 if self.bf16 else 4,
        )

    @property
    def qkv_rows(self) -> int:
        """Rows of the QKV projection on a TP rank."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim // self.tp
