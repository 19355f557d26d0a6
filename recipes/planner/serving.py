# SPDX-License-Identifier: Apache-2.0
"""Bytes that serving a model takes: the KV cache of sequences, next to its weights.

A sequence of S tokens keeps its keys and values:

    2 x layers x KV heads x head size x S x bytes of a number

A layer with a window keeps those of min(S, window) tokens. A tensor-parallel group divides weights
and KV heads; with more GPUs than KV heads, several GPUs keep the same head. Where a node does not
hold the weights, nodes form a pipeline: each has a part of the layers, their weights and their
caches.
"""

from dataclasses import dataclass

from recipes.planner.plan import HEADROOM, Plan
from recipes.spec.model_card import ModelCard

NUMBER_BYTES = {"bf16": 2, "fp8": 1}
"""Precisions of a KV cache, and the bytes of one of its numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """KV caches of sequences of a plan's length, on its GPUs."""

    tensor_parallel: int
    """GPUs that share each layer: those of a node, or as many of them as divide the heads."""
    pipeline: int
    """Groups of these GPUs that share a copy of the model; 0: all GPUs do not hold its weights."""
    kv_cache_bytes: dict[str, int]
    """Of one sequence, by precision."""
    sequences: dict[str, int]
    """That fit on all GPUs next to the weights in bf16, by precision."""


def kv_cache_bytes(card: ModelCard, seq_length: int, number_bytes: int) -> int:
    """Return the bytes of the keys and values of one sequence of `seq_length` tokens."""
    full, kept = card.layers, seq_length
    if card.pattern is not None and card.pattern.window is not None:
        full, kept = card.pattern.full_layers(card.layers), min(seq_length, card.pattern.window)
    tokens = full * seq_length + (card.layers - full) * kept
    return 2 * tokens * card.kv_heads * card.head_dim * number_bytes


def serving(plan: Plan) -> Serving:
    """Return the KV caches of sequences of a plan's length, and how many of them its GPUs hold.

    A GPU keeps the reserve and the headroom free, as it does in training. A copy takes the fewest
    groups whose GPUs hold its weights.
    """
    card, machine = plan.workload.card, plan.cluster
    of_node = min(plan.gpus, machine.gpus_per_node)
    tp = max(n for n in range(1, of_node + 1) if of_node % n == 0 and card.heads % n == 0)
    left = (1 - HEADROOM) * machine.gpu_bytes - plan.memory.categories["reserve"]
    weights = NUMBER_BYTES["bf16"] * card.parameters / tp
    groups = plan.gpus // tp
    # Of the group with the most layers.
    parts = {n: -(-card.layers // n) / card.layers for n in range(1, min(groups, card.layers) + 1)}
    pp = next((n for n, part in parts.items() if weights * part < left), 0)
    part = parts.get(pp, 1.0)
    free = left - weights * part
    share = -(-card.kv_heads // tp) / card.kv_heads
    caches = {
        name: kv_cache_bytes(card, plan.workload.seq_length, size)
        for name, size in NUMBER_BYTES.items()
    }
    return Serving(
        tensor_parallel=tp,
        pipeline=pp,
        kv_cache_bytes=caches,
        sequences={
            name: groups // pp * int(free // (share * size * part)) if pp else 0
            for name, size in caches.items()
        },
    )
