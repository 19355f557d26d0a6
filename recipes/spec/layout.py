# SPDX-License-Identifier: Apache-2.0
"""How one stage is laid on ranks."""

from dataclasses import dataclass
from typing import Literal, get_args

from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.memory.config import Offload, Recompute, Tiling

Sharding = Literal["none", "optimizer", "gradients", "parameters"]
Fp8Recipe = Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"]


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
class Fp8:
    """How the linear layers of a transformer layer compute in FP8; attention and LM head do not.

    By Transformer Engine: `delayed` scales a tensor by the largest value of earlier steps,
    `tensorwise` by its own largest value, `blockwise` 128 numbers (weights 128 x 128) at a time
    (NeMo's subchannel), `mxfp8` 32 numbers at a time, on Blackwell. Untried: no FP8 device yet.
    """

    recipe: Fp8Recipe = "none"
    bf16_first: int = 0
    """Layers at the start that compute in bf16."""
    bf16_last: int = 0
    """Layers at the end that compute in bf16."""

    def __post_init__(self) -> None:
        """Refuse unknown recipes, and layers in bf16 where they have no effect or no way."""
        if self.recipe not in get_args(Fp8Recipe):
            raise ValueError(
                f"fp8 recipe {self.recipe!r} is unknown; choose {', '.join(get_args(Fp8Recipe))}"
            )
        for name in ("bf16_first", "bf16_last"):
            layers = getattr(self, name)
            if layers < 0:
                raise ValueError(f"fp8 {name} is {layers} layers; it must be at least 0")
            if layers and self.recipe == "none":
                raise ValueError(
                    f"fp8 {name} is {layers} layers, and all compute in bf16 without fp8; choose a "
                    "recipe, or leave it out"
                )


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
    recompute: Recompute = Recompute()
    tiling: Tiling = Tiling()
    offload: Offload = Offload()
    sharding: Sharding = "optimizer"
    """What the DP (and CP) ranks have a part of each: nothing (ZeRO-0), the optimizer's state
    (ZeRO-1, Megatron-Core's distributed optimizer), gradients too (ZeRO-2) or parameters too
    (ZeRO-3), both by Megatron FSDP. FSDP's steps are tried on CPU ranks, its checkpoints and its
    use on GPUs are not; only FSDP reads its checkpoints."""
    optimizer_offload: float = 0.0
    """The fraction of the optimizer's state and step that is the CPU's, by Megatron-Core's
    HybridDeviceOptimizer. Its steps are tried on CPU; its copies to and from a GPU, and the
    precision-aware handing over of gradients that goes with them, are not."""
    fp8: Fp8 = Fp8()
    precision: Literal["fp32", "bf16"] = "bf16"
    device: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        """Refuse sizes below one."""
        for name in ("tp", "pp", "dp", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"layout {name} is {getattr(self, name)}; it must be at least 1")
        if self.cp.size < 1:
            raise ValueError(f"layout cp is {self.cp.size}; it must be at least 1")
        if self.sharding not in get_args(Sharding):
            raise ValueError(
                f"layout sharding {self.sharding!r} is unknown; choose "
                f"{', '.join(get_args(Sharding))}"
            )
        if self.optimizer_offload and self.device == "cpu":
            raise ValueError(
                f"layout optimizer_offload is {self.optimizer_offload:g} on cpu, where the "
                "optimizer is already; leave it out"
            )

    @property
    def degrees(self) -> dict[str, int]:
        """Ranks of each kind of parallelism: `tp`, `cp`, `pp`, `dp`."""
        return {"tp": self.tp, "cp": self.cp.size, "pp": self.pp, "dp": self.dp}

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp * self.cp.size * self.pp * self.dp
