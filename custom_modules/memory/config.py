# SPDX-License-Identifier: Apache-2.0
"""Configuration of activation memory: recompute, host offload and tiling.

Does not import torch: recipes and the planner build it; `custom_modules.memory.recompute`,
`custom_modules.memory.host_offload`, `custom_modules.tiling.mlp` and
`custom_modules.tiling.cross_entropy` implement it.

| recompute | a layer keeps | attention units | implemented by |
| --- | --- | --- | --- |
| `none` | everything | 7 | |
| `full` | its input | 9 | this package, by layer |
| `kept_attention` | its input, attention output and log-sum-exp | 7 | this package, by layer |
| `selective` | all but the tensors of `modules` | 7 (9 with core_attn) | Megatron-Core |
| `uniform` | the input of each `layers` layers | 9 | Megatron-Core |
| `block` | its input, in the first `layers` of a pipeline stage | 9 there | Megatron-Core |

An attention unit is half an attention forward: 2 for a forward, 5 for a backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

RecomputeKind = Literal["none", "full", "kept_attention", "selective", "uniform", "block"]
LayerKind = Literal["none", "full", "kept_attention"]
OffloadedTensors = Literal["none", "inputs", "attention", "both"]
MEGATRON_KINDS = ("selective", "uniform", "block")
LOSS_TILE, MLP_TILE = 4096, 8192
"""Default tokens of a tile. Each tile adds its weight gradient to a sum, which costs memory traffic
of the weight's size: these defaults keep it to a few percent of a large GPU's time."""
SELECTIVE_MODULES = ("core_attn", "mlp")
"""Modules that Megatron-Core's selective recompute supports in a dense layer. It accepts layernorm
too, but only with Transformer Engine, where norms are fused into the projections and it has no
effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """The tensors that the backward rebuilds instead of keeping them."""

    kind: RecomputeKind = "none"
    every: int = 1
    """For full and kept_attention: every N-th layer, counted from the first."""
    others: LayerKind = "none"
    """The kind of the layers in between, if `every` is above 1."""
    layers: int = 1
    """For uniform: the layers of a chunk. For block: those recomputed of each pipeline stage."""
    # A list, since nemo-run 0.11.1 cannot parse an override of a tuple.
    modules: list[str] = field(default_factory=list)
    """For selective: core_attn, mlp or both."""

    def __post_init__(self) -> None:
        """Refuse unknown kinds, and settings that the kind does not use or that are missing."""
        if self.kind not in get_args(RecomputeKind):
            raise ValueError(_unknown("recompute", self.kind, RecomputeKind))
        if self.others not in get_args(LayerKind):
            raise ValueError(_unknown("recompute others", self.others, LayerKind))
        for name in ("every", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"recompute {name} is {getattr(self, name)}; it is at least 1")
        by_layer = self.kind in ("full", "kept_attention")
        if self.every > 1 and not by_layer:
            raise ValueError(self._without_effect("every", "full or kept_attention"))
        if self.others != "none" and self.every == 1:
            raise ValueError(
                f"recompute others is {self.others!r}, and every layer is {self.kind}; "
                "set every above 1, or leave it out"
            )
        if self.layers > 1 and self.kind not in ("uniform", "block"):
            raise ValueError(self._without_effect("layers", "uniform or block"))
        if self.modules and self.kind != "selective":
            raise ValueError(self._without_effect("modules", "selective"))
        unknown = sorted(set(self.modules) - set(SELECTIVE_MODULES))
        if unknown or (self.kind == "selective" and not self.modules):
            raise ValueError(
                f"recompute modules are {self.modules}; selective takes one or more of "
                f"{', '.join(SELECTIVE_MODULES)}"
            )

    def of_layer(self, number: int) -> LayerKind:
        """Return the kind of a layer by its number in the whole model, from 1.

        Megatron-Core's kinds are applied by its own blocks: here such a layer has none.
        """
        if self.kind in MEGATRON_KINDS:
            return "none"
        mine = (number - 1) % self.every == 0
        return self.kind if mine else self.others  # type: ignore[return-value]

    def megatron_settings(self) -> dict[str, Any]:
        """Return the equivalent fields of Megatron-Core's config."""
        granularity = {"selective": "selective", "uniform": "full", "block": "full"}
        by_block = self.kind in ("uniform", "block")
        return {
            "recompute_granularity": granularity.get(self.kind),
            "recompute_method": self.kind if by_block else None,
            "recompute_num_layers": self.layers if by_block else None,
            "recompute_modules": list(self.modules) if self.modules else None,
        }

    def _without_effect(self, name: str, kinds: str) -> str:
        return (
            f"recompute {name} is {getattr(self, name)}, which has no effect on {self.kind}; "
            f"leave it out, or choose {kinds}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """Parts of the model that take the sequence a tile at a time; tiles in tokens of a rank."""

    loss: bool = False
    """LM head and cross-entropy: logits of a tile at a time, never of the whole sequence."""
    loss_tile: int = LOSS_TILE
    mlp: bool = False
    """The MLP with the norm before it."""
    mlp_tile: int = MLP_TILE

    def __post_init__(self) -> None:
        """Refuse empty tiles, and sizes of parts that are not tiled."""
        for part, usual in (("loss", LOSS_TILE), ("mlp", MLP_TILE)):
            tile = getattr(self, f"{part}_tile")
            if tile < 1:
                raise ValueError(f"tiling {part}_tile is {tile} tokens; it must be at least 1")
            if tile != usual and not getattr(self, part):
                raise ValueError(
                    f"tiling {part}_tile is {tile} tokens, which has no effect without "
                    f"tiling {part}; set that too, or leave it out"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """The kept tensors of recompute that wait for the backward in host memory."""

    tensors: OffloadedTensors = "none"
    """Layer inputs, attention outputs (with their log-sum-exp), or both."""
    cap_gib: float = 0.0
    """The most pinned host memory that a rank may take."""
    every: int = 1
    """Offload every N-th layer, counted from the first."""

    def __post_init__(self) -> None:
        """Refuse unknown tensors, and an offload without a cap."""
        if self.tensors not in get_args(OffloadedTensors):
            raise ValueError(_unknown("offload", self.tensors, OffloadedTensors))
        if self.every < 1:
            raise ValueError(f"offload every is {self.every}; it is at least 1")
        if self.tensors != "none" and self.cap_gib <= 0:
            raise ValueError(
                f"offload cap_gib is {self.cap_gib:g}; give the host memory a rank may pin, in GiB"
            )
        if self.tensors == "none" and (self.cap_gib or self.every > 1):
            raise ValueError(
                "offload cap_gib and every have no effect without tensors; choose inputs, "
                "attention or both"
            )

    @property
    def inputs(self) -> bool:
        """Whether layer inputs go to the host."""
        return self.tensors in ("inputs", "both")

    @property
    def attention(self) -> bool:
        """Whether attention outputs go to the host."""
        return self.tensors in ("attention", "both")

    def takes(self, number: int) -> bool:
        """Whether the tensors of a layer, by its number from 1, go to the host."""
        return self.tensors != "none" and (number - 1) % self.every == 0

    def refusal(self, recompute: Recompute) -> str | None:
        """Return why nothing could be offloaded with a kind of recompute, or None."""
        if self.tensors == "none":
            return None
        kinds = {recompute.kind, recompute.others} if recompute.every > 1 else {recompute.kind}
        if not kinds & {"full", "kept_attention"}:
            return (
                f"offload {self.tensors} moves what recompute full or kept_attention keeps, and "
                f"recompute is {recompute.kind}; choose one of them, or leave offload out"
            )
        if self.attention and "kept_attention" not in kinds:
            return (
                f"offload {self.tensors} with recompute {recompute.kind}, which keeps no attention "
                "output; choose inputs, or recompute kept_attention"
            )
        return None


KEEP_ALL, UNTILED, ON_DEVICE = Recompute(), Tiling(), Offload()
"""The defaults of a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensors:
    """Sizes of the tensors that one recomputed layer keeps on one rank."""

    tokens: int
    """Tokens of this rank: the sequence over CP, times the micro-batch."""
    hidden: int
    heads: int
    """Heads of this TP rank."""
    head_dim: int
    tp: int = 1
    """Ranks of tensor parallelism with sequence parallelism, which divides the layer input."""
    element_bytes: int = 2
    sum_bytes: int = 4
    """Bytes of a log-sum-exp."""

    @property
    def input_bytes(self) -> int:
        """Bytes of the layer's input, [s / TP, b, hidden]."""
        return self.tokens // self.tp * self.hidden * self.element_bytes

    @property
    def attention_bytes(self) -> int:
        """Bytes of the attention output [s, b, h, D] and the log-sum-exp [b, h, s]."""
        return self.tokens * self.heads * (self.head_dim * self.element_bytes + self.sum_bytes)

    def on_host(
        self, offload: Offload, recompute: Recompute, *, layers: Sequence[int], in_flight: int = 1
    ) -> int:
        """Return the host bytes of a pipeline stage with these layers, by number from 1.

        `in_flight` is the number of micro-batches whose backward is still to come: one without
        pipeline parallelism, at most PP with it.
        """
        held = 0
        for number in layers:
            kind = recompute.of_layer(number)
            if not offload.takes(number) or kind == "none":
                continue
            held += self.input_bytes * offload.inputs
            held += self.attention_bytes * (offload.attention and kind == "kept_attention")
        return held * in_flight


def _unknown(what: str, value: object, choices: Any) -> str:
    return f"{what} {value!r} is unknown; choose {', '.join(get_args(choices))}"
