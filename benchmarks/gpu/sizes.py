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
    """One rank of an all-to-all of `ranks`, which shares the heads of a card."""

    lengths: tuple[int, ...]
    ranks: int
    kernels: tuple[str, ...]
    """Of those that serve the device; all of them if empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What is measured, in tokens, layers and bytes."""

    device: Device
    card: ModelCard
    """Whose geometry blocks and stacks have."""
    whole: ModelCard
    """Trained with all of its layers; its heads are smaller."""
    stack_layers: int
    heads_at_a_time: tuple[int, ...]
    """Of the stacks: between the fewest and all."""
    loss_tokens: int
    loss_tiles: tuple[int, ...]
    """Of our loss head, the default first."""
    mlp_tokens: int
    mlp_tile: int
    attention: AttentionSizes
    stack_length: int
    longest_stack: int
    step_lengths: tuple[int, int]
    longest_step: int
    learned_length: int
    """Of the steps whose loss is compared after `learned_steps`."""
    learned_steps: int
    rounds: int = 3
    """Of ways that are compared, in turn."""

    @property
    def dtype(self) -> str:
        """Name of torch's dtype."""
        return "bfloat16" if self.device == "cuda" else "float32"

    def card_named(self, name: str) -> ModelCard:
        """Return one of the two cards; `NAME_N_layers` is the one of that name with N layers."""
        for card in (self.card, self.whole):
            for layers in range(1, card.layers + 1):
                if name == layered(card, layers):
                    return replace(card, name=name, layers=layers)
            if name == card.name:
                return card
        raise ValueError(f"{name} is not {self.card.name}, {self.whole.name}, or some layers of it")


def layered(card: ModelCard, layers: int) -> str:
    """Return the name of a card with fewer layers."""
    return f"{card.name}_{layers}_layers"


ON_GPU = Sizes(
    device="cuda",
    card=LLAMA31_8B,
    whole=LLAMA32_1B,
    stack_layers=2,
    heads_at_a_time=(8, 32),
    loss_tokens=16 * K,
    loss_tiles=(4 * K, 2 * K, 512),
    mlp_tokens=128 * K,
    mlp_tile=8 * K,
    attention=AttentionSizes(lengths=(32 * K, 128 * K), ranks=8, kernels=("cudnn", "cuda_flash")),
    stack_length=64 * K,
    longest_stack=512 * K,
    step_lengths=(32 * K, 128 * K),
    longest_step=1024 * K,
    learned_length=4 * K,
    learned_steps=200,
)
_SMALL = replace(TINY, name="small", layers=4, heads=8, kv_heads=4, head_dim=16)
ON_CPU = Sizes(
    device="cpu",
    card=_SMALL,
    whole=replace(_SMALL, name="small_whole"),
    stack_layers=2,
    heads_at_a_time=(2, 8),
    loss_tokens=64,
    loss_tiles=(16, 8),
    mlp_tokens=64,
    mlp_tile=16,
    attention=AttentionSizes(lengths=(64,), ranks=4, kernels=()),
    stack_length=64,
    longest_stack=256,
    step_lengths=(64, 96),
    longest_step=128,
    learned_length=64,
    learned_steps=20,
    rounds=2,
)
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
