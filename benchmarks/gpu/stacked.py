# SPDX-License-Identifier: Apache-2.0
"""Steps of a small Llama under each stack of memory choices, in turn."""

from dataclasses import asdict
from typing import Any

import torch

from benchmarks.gpu.blocks import NOT_INSTALLED
from benchmarks.gpu.cases import ALST, NOTHING_AWAY, OURS
from benchmarks.gpu.sizes import Sizes, layered
from benchmarks.harness.machine import version
from benchmarks.harness.rounds import in_turns
from benchmarks.stacks import Found, Shape, Stack, one_rank, step
from custom_modules.memory.config import Offload, Recompute, Tiling
from custom_modules.memory.pinned_pool import host_memory_left
from recipes.spec.units import GiB

SHORTER = 8
"""A step too long to be run twice is warmed up by one of an eighth of its length."""
HOST_SHARE = 0.85
"""Of the host's free memory, that the offload may pin."""


def groups(sizes: Sizes) -> dict[str, list[str]]:
    """Return the stacks that are measured in turn, by the name of the group.

    `ours` takes the fewest heads at a time; those with a U, or Ulysses, which takes all, have
    nothing away.
    """
    return {
        "heads at a time": [NOTHING_AWAY, *map("U = {}".format, sizes.heads_at_a_time), "Ulysses"],
        "offload": [OURS, NOTHING_AWAY],
        "ALST": [ALST],
        "all": [OURS, NOTHING_AWAY, "ours, full", ALST, "Megatron, full"],
    }


def stacks(sizes: Sizes) -> dict[str, Stack]:
    """Return the stacks by their names, with as much host memory as is free now."""
    tiles = Tiling(loss=True, loss_tile=sizes.loss_tiles[0], mlp=True, mlp_tile=sizes.mlp_tile)
    cap = HOST_SHARE * host_memory_left() / GiB
    both, inputs = Offload(tensors="both", cap_gib=cap), Offload(tensors="inputs", cap_gib=cap)
    kept, full = Recompute(kind="kept_attention"), Recompute(kind="full")
    ours: dict[str, Any] = {"tiling": tiles, "head_chunked": True}
    found = [
        Stack(name=OURS, recompute=kept, offload=both, **ours),
        Stack(name=NOTHING_AWAY, recompute=kept, **ours),
        *(Stack(name=f"U = {heads}", recompute=kept, heads_per_stage=heads, **ours)
          for heads in sizes.heads_at_a_time),
        Stack(name="Ulysses", recompute=kept, tiling=tiles),
        Stack(name="ours, full", recompute=full, offload=inputs, **ours),
        Stack(name=ALST, alst=tiles),
        Stack(name="Megatron, full", recompute=Recompute(kind="uniform")),
    ]  # fmt: skip
    return {stack.name: stack for stack in found}


def shape_of(sizes: Sizes) -> Shape:
    """Return the card's shape with few layers."""
    card = sizes.card_named(layered(sizes.card, sizes.stack_layers))
    return Shape(
        layers=card.layers, hidden=card.hidden, ffn=card.ffn_hidden, heads=card.heads,
        kv_heads=card.kv_heads, head_dim=card.head_dim, vocab=card.vocab,
        dtype=getattr(torch, sizes.dtype), device=torch.device(sizes.device),
    )  # fmt: skip


def stack(sizes: Sizes, *, group: str, length: int) -> dict[str, Any]:
    """Return what each stack of a group takes, by its name.

    The first step of each is not timed, and gives its bytes; then they take turns. At the longest
    length each runs once, after a shorter one.
    """
    shape, long = shape_of(sizes), length >= sizes.longest_stack
    found: dict[str, Found] = {}
    rounds: dict[str, list[float]] = {way: [] for way in groups(sizes)[group]}

    def run(way: str, **chosen: Any) -> Found:
        if way == ALST and version("deepspeed") is None:
            return Found(reason=NOT_INSTALLED.format("-e '.[bench]'"))
        try:
            return step(shape, stacks(sizes)[way], length, **chosen)
        except MemoryError as raised:  # of the host
            return Found(reason=str(raised))

    with one_rank(shape.device):
        for way in rounds:
            found[way] = run(way, warm_up=length // SHORTER if long else 0)
            if long and not found[way].reason:
                rounds[way].append(found[way].seconds)
        able = [way for way in rounds if not found[way].reason]
        for way in in_turns(able, 0 if long else sizes.rounds):
            again = run(way, keep_cache=True)
            if again.reason:
                raise RuntimeError(again.reason)
            rounds[way].append(again.seconds)
    return {
        "flops": shape.model_flops(length),
        "layers": shape.layers,
        "ways": {
            way: {"reason": one.reason} if one.reason else {**asdict(one), "rounds": rounds[way]}
            for way, one in found.items()
        },
    }  # fmt: skip
