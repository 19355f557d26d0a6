# SPDX-License-Identifier: Apache-2.0
"""Distribution of one stage over ranks."""

from dataclasses import dataclass
from typing import Literal, get_args

from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.memory.config import Offload, Recompute, Tiling

Sharding = Literal["none", "optimizer", "gradients", "parameters"]
Fp8Recipe = Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextParallel:
    """How one sequence is split over several ranks."""

    size: int
    how: ContextParallelKind

    @classmethod
    def auto(cls, size: int) -> "ContextParallel":
        """Choose the kind from heads, ranks, links and length; the log says which and why."""
        return cls(size=size, how=ContextParallelKind())

    @classmethod
    def ring(cls, size: int) -> "ContextParallel":
        """Pass keys and values around a ring of ranks (arXiv 2310.01889)."""
        return cls(size=size, how=ContextParallelKind(kind="ring"))

    @classmethod
    def ulysses(cls, size: int) -> "ContextParallel":
        """Exchange sequence shards for head shards by all-to-all (arXiv 2309.14509)."""
        return cls(size=size, how=ContextParallelKind(kind="ulysses"))

    @classmethod
    def head_chunked(cls, size: int, *, heads_per_stage: int | None = None) -> "ContextParallel":
        """All-to-all a few heads at a time (arXiv 2602.21196), by default as few as possible."""
        return cls(
            size=size,
            how=ContextParallelKind(kind="head_chunked", heads_per_stage=heads_per_stage),
        )

    @classmethod
    def hybrid(
        cls, *, ulysses: int, ring: int, heads_per_stage: int | None = None
    ) -> "ContextParallel":
        """All-to-all inside, ring outside (arXiv 2405.07719); by default all heads at once."""
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
        """Transformer Engine's implementation, for comparison on its GPUs."""
        return cls(size=size, how=ContextParallelKind(kind=kind))

    @classmethod
    def transformer_engine_hybrid(cls, *, a2a: int, p2p: int) -> "ContextParallel":
        """Transformer Engine's all-to-all inside, ring outside (its kind `a2a+p2p`)."""
        return cls(size=a2a * p2p, how=ContextParallelKind(kind="a2a+p2p", ulysses=a2a))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8:
    """FP8 for the linear layers of transformer layers; attention and LM head stay in bf16.

    Head-chunked attention projects q, k and v in bf16 too.

    Recipes of Transformer Engine: `delayed` scales a tensor by the largest value of earlier steps,
    `tensorwise` by its own largest value, `blockwise` 128 numbers (weights 128 x 128) at a time
    (NeMo's subchannel), `mxfp8` 32 numbers at a time, on Blackwell. Of these only
    `tensorwise` has run on a GPU.
    """

    recipe: Fp8Recipe = "none"
    bf16_first: int = 0
    """Layers at the start that compute in bf16."""
    bf16_last: int = 0
    """Layers at the end that compute in bf16."""

    def __post_init__(self) -> None:
        """Raise ValueError for unknown recipes and for bf16 layers that have no effect."""
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
                    f"fp8 {name} is {layers} layers, but without fp8 all compute in bf16; choose a "
                    "recipe, or leave it out"
                )

    @property
    def format(self) -> Literal["e4m3", "hybrid"]:
        """Format of FP8 numbers: `hybrid` has gradients in E5M2, whose range is larger.

        As Transformer Engine's own recipes: scales of blocks keep gradients in the range of E4M3.
        """
        return "e4m3" if self.recipe in ("blockwise", "mxfp8") else "hybrid"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Parallel sizes of a stage, and its recompute, tiling, offload, sharding and precision."""

    tp: int = 1
    """Tensor parallel ranks; above 1 sequence parallelism is on."""
    cp: ContextParallel = ContextParallel.ulysses(1)
    pp: int = 1
    vpp: int = 1
    """Chunks of layers of each pipeline rank; above 1 the pipeline is interleaved. Its steps are
    tested on CPU ranks, its use on GPUs is not."""
    dp: int = 1
    ep: int = 1
    """Expert parallel ranks, each with a part of the experts. They are the TP, CP and DP ranks of a
    pipeline stage in other groups, so they add no ranks (arXiv 2504.14960)."""
    etp: int | None = None
    """Tensor parallel ranks of each expert; None: as many as of the other layers."""
    micro_batch: int = 1
    """Sequences in one forward pass."""
    recompute: Recompute = Recompute()
    tiling: Tiling = Tiling()
    offload: Offload = Offload()
    sharding: Sharding = "optimizer"
    """What is sharded over the DP (and CP) ranks: nothing (ZeRO-0), the optimizer's state
    (ZeRO-1, Megatron-Core's distributed optimizer), gradients too (ZeRO-2) or parameters too
    (ZeRO-3), both by Megatron FSDP. FSDP's steps are tested on CPU ranks, its checkpoints are
    not, and on an H100 it could not read an import; only FSDP reads its checkpoints."""
    optimizer_offload: float = 0.0
    """Fraction of the optimizer's state and step that is on the CPU, by Megatron-Core's
    HybridDeviceOptimizer. Its steps are tested on CPU; its copies to and from a GPU, and the
    precision-aware transfer of gradients that they require, are not."""
    fp8: Fp8 = Fp8()
    precision: Literal["fp32", "bf16"] = "bf16"
    device: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        """Raise ValueError for sizes below one and unknown choices."""
        for name in ("tp", "pp", "vpp", "dp", "ep", "etp", "micro_batch"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"layout {name} is {size}; it must be at least 1")
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
    def expert_tp(self) -> int:
        """Tensor parallel ranks of each expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.tp * self.cp.size * self.pp * self.dp
