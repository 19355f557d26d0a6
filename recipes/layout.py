# SPDX-License-Identifier: Apache-2.0
"""How one stage is laid on ranks."""

from dataclasses import dataclass
from typing import Literal

from custom_modules.context_parallel_kind import ContextParallelKind


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextParallel:
    """How one sequence is shared by several ranks."""

    size: int
    how: ContextParallelKind

    @classmethod
    def auto(cls, size: int) -> "ContextParallel":
        """The kind that heads, ranks, links and length suggest; the log says which and why."""
        return cls(size=size, how=ContextParallelKind())

    @classmethod
    def ring(cls, size: int) -> "ContextParallel":
        """Keys and values round a ring of ranks (arXiv 2310.01889)."""
        return cls(size=size, how=ContextParallelKind(kind="ring"))

    @classmethod
    def ulysses(cls, size: int) -> "ContextParallel":
        """All-to-all from sequence shards to head shards around attention (arXiv 2309.14509)."""
        return cls(size=size, how=ContextParallelKind(kind="ulysses"))

    @classmethod
    def head_chunked(cls, size: int, *, heads_per_stage: int | None = None) -> "ContextParallel":
        """The all-to-all a few heads at a time (arXiv 2602.21196), the fewest by default."""
        return cls(
            size=size,
            how=ContextParallelKind(kind="head_chunked", heads_per_stage=heads_per_stage),
        )

    @classmethod
    def hybrid(
        cls, *, ulysses: int, ring: int, heads_per_stage: int | None = None
    ) -> "ContextParallel":
        """All-to-all inside, ring outside (arXiv 2405.07719); all heads at once by default."""
        return cls(
            size=ulysses * ring,
            how=ContextParallelKind(
                kind="hybrid", ulysses=ulysses, heads_per_stage=heads_per_stage
            ),
        )

    @classmethod
    def transformer_engine(
        cls, kind: Literal["p2p", "a2a", "all_gather"], size: int
    ) -> "ContextParallel":
        """Transformer Engine's own, for comparison on its GPUs."""
        return cls(size=size, how=ContextParallelKind(kind=kind))

    @classmethod
    def transformer_engine_hybrid(cls, *, a2a: int, p2p: int) -> "ContextParallel":
        """Transformer Engine's own all-to-all inside, ring outside (its kind `a2a+p2p`)."""
        return cls(size=a2a * p2p, how=ContextParallelKind(kind="a2a+p2p", ulysses=a2a))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Ranks by kind of parallelism, and the choices that go with them."""

    tp: int = 1
    """Tensor parallel ranks; sequence parallelism goes with it."""
    cp: ContextParallel = ContextParallel.ulysses(1)
    pp: int = 1
    dp: int = 1
    micro_batch: int = 1
    """Sequences in one forward."""
    recompute: Literal["none", "full"] = "none"
    precision: Literal["fp32", "bf16"] = "bf16"
    device: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        """Refuse sizes below one."""
        for name in ("tp", "pp", "dp", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"layout {name} is {getattr(self, name)}; it must be at least 1")
        if self.cp.size < 1:
            raise ValueError(f"layout cp is {self.cp.size}; it must be at least 1")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp * self.cp.size * self.pp * self.dp
