# SPDX-License-Identifier: Apache-2.0
"""Sizes of the measurements: those of a GPU, and small ones that a CPU runs in seconds."""

from dataclasses import dataclass, replace
from typing import Literal

from recipes.models import LLAMA31_8B, LLAMA32_1B, TINY
from recipes.spec.cluster import Cluster, load
from recipes.spec.model_card import ModelCard
from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.units import GiB, K

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSizes:
    """One rank of an all-to-all of `ranks`, which shares the heads of the card."""

    lengths: tuple[int, ...]
    ranks: int
    seconds: float
    """Of timed runs for each block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What is measured, in tokens, layers and bytes."""

    device: Device
    card: ModelCard
    """Whose geometry blocks and stacks have."""
    layers: tuple[int, int]
    """Of the stacks and shorter steps; of the longer ones."""
    whole: ModelCard
    """Trained with all of its layers."""
    loss_tokens: int
    mlp_tokens: int
    loss_tile: int
    mlp_tile: int
    attention: AttentionSizes
    slope_lengths: tuple[int, ...]
    """Of the stacks: every way at each, for times, bytes, and what a token adds."""
    longest_stack: int
    connections_length: int
    step_lengths: tuple[int, ...]
    longest_steps: tuple[int, ...]
    run_length: int
    copy_bytes: int
    fork_bytes: int
    rounds: int

    @property
    def dtype(self) -> str:
        """Name of torch's dtype."""
        return "bfloat16" if self.device == "cuda" else "float32"

    def of_layers(self, layers: int) -> ModelCard:
        """Return the card with fewer layers, under a name of its own."""
        return replace(self.card, name=f"{self.card.name}_{layers}_layers", layers=layers)

    @property
    def cards(self) -> dict[str, ModelCard]:
        """All that are trained, by name."""
        made = [*(self.of_layers(layers) for layers in self.layers), self.whole]
        return {card.name: card for card in made}


ON_GPU = Sizes(
    device="cuda",
    card=LLAMA31_8B,
    layers=(4, 8),
    whole=LLAMA32_1B,
    loss_tokens=16 * K,
    mlp_tokens=128 * K,
    loss_tile=4 * K,
    mlp_tile=8 * K,
    attention=AttentionSizes(lengths=(32 * K, 128 * K, 512 * K), ranks=8, seconds=1.0),
    slope_lengths=(64 * K, 128 * K, 256 * K),
    longest_stack=512 * K,
    connections_length=128 * K,
    step_lengths=(32 * K, 128 * K),
    longest_steps=(512 * K, 1024 * K),
    run_length=64 * K,
    copy_bytes=2 * GiB,
    fork_bytes=8 * GiB,
    rounds=2,
)
_SMALL = replace(TINY, name="small", heads=8, kv_heads=4, head_dim=16)
ON_CPU = Sizes(
    device="cpu",
    card=_SMALL,
    layers=(2, 3),
    whole=replace(_SMALL, name="small_whole"),
    loss_tokens=64,
    mlp_tokens=64,
    loss_tile=16,
    mlp_tile=16,
    attention=AttentionSizes(lengths=(64,), ranks=4, seconds=0.01),
    slope_lengths=(64, 128),
    longest_stack=256,
    connections_length=64,
    step_lengths=(64,),
    longest_steps=(128,),
    run_length=256,
    copy_bytes=2**20,
    fork_bytes=2**22,
    rounds=1,
)
SHORTER = 8
"""A step too long to be run twice is warmed up by one of an eighth of its length."""
SIZES: dict[Device, Sizes] = {"cuda": ON_GPU, "cpu": ON_CPU}


def ladder_of(length: int, *, steps: int = 1) -> Ladder:
    """Return a ladder of one stage from random weights, with one sequence a step."""
    stage = Stage(
        seq_length=length, rope="native", tokens=steps * length, tokens_per_batch=length,
        lr=Cosine(peak=1e-4), start="scratch",
    )  # fmt: skip
    return Ladder(name="measured", source="ours", stages=(stage,))


def machine(device: Device, name: str = "") -> Cluster:
    """Return this machine as the planner's cluster of one GPU.

    Rates are those of the shipped file whose GPU has a part of `name`, by default the name of the
    GPU that is here; memory is this machine's. On a CPU rates are those of an H100, so that
    predictions are made, and mean nothing.
    """
    from custom_modules.memory.pinned_pool import host_memory_left

    clusters = [load(one) for one in ("dgx_h100", "dgx_h200", "dgx_b200", "dgx_a100")]
    memory = clusters[0].gpu.memory_gib
    if device == "cuda" and not name:
        import torch

        name = torch.cuda.get_device_name()
        memory = torch.cuda.get_device_properties(0).total_memory / GiB
    near = next((one for one in clusters if one.gpu.name.split()[0] in name), clusters[0])
    return replace(
        near, name="this machine", gpu=replace(near.gpu, memory_gib=memory), gpus_per_node=1,
        gpus_per_link=0, host_memory_gib=host_memory_left() / GiB,
    )  # fmt: skip
