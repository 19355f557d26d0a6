# SPDX-License-Identifier: Apache-2.0
"""Steps of a small Llama under each stack of memory choices, and the longest that fits each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.blocks import NOT_INSTALLED
from benchmarks.gpu.sizes import SHORTER, Sizes
from benchmarks.harness.machine import version
from benchmarks.stacks import Found, Shape, Stack, one_rank, step
from custom_modules.attention import registry
from custom_modules.attention.documents import Documents
from custom_modules.dtypes import accumulation_dtype
from custom_modules.memory.config import Offload, Recompute, Tiling
from custom_modules.memory.pinned_pool import host_memory_left
from custom_modules.patching import patched
from recipes.spec.units import GiB

HOST_SHARE = 0.85
"""Of the host's free memory, that the offload may pin."""
MOST_DOUBLINGS = {"cuda": 8, "cpu": 2}


def stacks(sizes: Sizes) -> dict[str, Stack]:
    """Return the stacks by their names."""
    tiles = Tiling(loss=True, loss_tile=sizes.loss_tile, mlp=True, mlp_tile=sizes.mlp_tile)
    cap = HOST_SHARE * host_memory_left() / GiB
    both, inputs = Offload(tensors="both", cap_gib=cap), Offload(tensors="inputs", cap_gib=cap)
    kept, full = Recompute(kind="kept_attention"), Recompute(kind="full")
    ours: dict[str, Any] = {"tiling": tiles, "head_chunked": True}
    found = [
        Stack(name="ours", recompute=kept, offload=both, **ours),
        Stack(name="ours, nothing away", recompute=kept, **ours),
        Stack(name="ours, full", recompute=full, offload=inputs, **ours),
        Stack(name="ALST-like", alst=tiles),
        Stack(name="Megatron, full", recompute=Recompute(kind="uniform")),
        Stack(
            name="Megatron, selective",
            recompute=Recompute(kind="selective", modules=["core_attn"]),
        ),
        Stack(name="keep all"),
    ]
    return {stack.name: stack for stack in found}


def shape_of(sizes: Sizes) -> Shape:
    """Return the card's shape with the fewer layers."""
    card = sizes.of_layers(sizes.layers[0])
    return Shape(
        layers=card.layers, hidden=card.hidden, ffn=card.ffn_hidden, heads=card.heads,
        kv_heads=card.kv_heads, head_dim=card.head_dim, vocab=card.vocab,
        dtype=getattr(torch, sizes.dtype), device=torch.device(sizes.device),
    )  # fmt: skip


def stack(sizes: Sizes, *, way: str, length: int) -> dict[str, Any]:
    """Return a step's seconds, bytes and loss; raise RuntimeError where it cannot run."""
    shape, chosen = shape_of(sizes), _able(stacks(sizes)[way])
    long = length >= sizes.longest_stack
    with one_rank(shape.device):
        if long:
            _require(step(shape, chosen, length // SHORTER))
        found = _require(step(shape, chosen, length, warm_up=not long))
    return {
        "seconds": found.seconds,
        "warmed_by": length // SHORTER if long else length,
        "peak_bytes": found.peak_bytes,
        "inputs_away": found.inputs_away,
        "loss": found.loss,
        "gradient_norm": found.gradient_norm,
        "flops": shape.model_flops(length),
    }


def _able(chosen: Stack) -> Stack:
    if chosen.alst is not None and version("deepspeed") is None:
        raise RuntimeError(NOT_INSTALLED.format("-e '.[bench]'"))
    return chosen


def _require(found: Found) -> Found:
    if found.reason:
        raise RuntimeError(found.reason)
    return found


def longest(sizes: Sizes, *, way: str) -> dict[str, Any]:
    """Return the longest step that fits, to an eighth of a power of two, and one that does not.

    The products of attention are left out: they take the time and no memory of their own.
    """
    shape, chosen = shape_of(sizes), _able(stacks(sizes)[way])
    reasons: dict[int, str] = {}

    def fits(length: int) -> bool:
        try:
            reasons[length] = step(shape, chosen, length).reason
        except MemoryError as raised:  # of the host
            reasons[length] = str(raised)
        return not reasons[length]

    with one_rank(shape.device), without_products():
        first = sizes.slope_lengths[0]
        if not fits(first):
            raise RuntimeError(f"{first:,} tokens: {reasons[first]}")
        fit, too_long = _climbed(first, fits, MOST_DOUBLINGS[sizes.device])
    why = reasons[too_long] if too_long else ""
    return {"tokens": fit, "too_long": too_long, "reason": why, "probes": len(reasons)}


def _climbed(first: int, fits: Callable[[int], bool], doublings: int) -> tuple[int, int]:
    """Return a length that fits, and the next eighth that does not, or 0 where none was found."""
    fit = first
    for _ in range(doublings):
        if not fits(2 * fit):
            break
        fit *= 2
    else:
        return fit, 0
    unit = fit // 8
    low, high = 8, 16
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * unit):
            low = middle
        else:
            high = middle
    return low * unit, high * unit


@contextmanager
def without_products() -> Iterator[None]:
    """Have every kernel return tensors of the right shape without computing them."""
    emptied = {name: replace(kernel, forward=_forward, backward=_backward)
               for name, kernel in registry.KERNELS.items()}  # fmt: skip
    registry.kernel_for.cache_clear()
    try:
        with patched(registry, "KERNELS", emptied):
            yield
    finally:
        registry.kernel_for.cache_clear()


def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Documents | None
) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=accumulation_dtype(q.dtype))


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, documents: Documents | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
