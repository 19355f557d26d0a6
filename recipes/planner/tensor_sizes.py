# SPDX-License-Identifier: Apache-2.0
"""Sizes of the large tensors of a step, to identify a failed allocation by its bytes.

Sizes on one rank; t is its tokens, e bytes per number. Tiled tensors are listed whole and as a
tile, since a log may be from a run without tiling.
"""

from recipes.planner.workload import Workload

PAGE = 2 * 2**20
"""Multiple that CUDA's caching allocator rounds large requests up to."""
SAME = 0.006
"""Rounding error of a size written with two decimals."""


def tensor_sizes(workload: Workload) -> dict[str, float]:
    """Return the bytes of each large tensor of a rank."""
    card, layout, e, t = workload.card, workload.layout, workload.element_bytes, workload.tokens
    vocab, ffn = workload.vocabulary_rows, card.ffn_hidden / layout.tp
    heads, kv = (n * card.head_dim / layout.tp for n in (card.heads, card.kv_heads))
    weights = workload.most(workload.weights)
    held = workload.weights if layout.sharding == "none" else workload.shard
    states = workload.most(held)
    loss_tile, mlp_tile = (min(t, n) for n in (layout.tiling.loss_tile, layout.tiling.mlp_tile))
    return {
        "logits": t * vocab * e,
        "logits in fp32": t * vocab * 4,
        "a tile of logits": loss_tile * vocab * e,
        "a tile of logits in fp32": loss_tile * vocab * 4,
        "the MLP's gate and up": 2 * t * ffn * e,
        "the MLP's intermediate": t * ffn * e,
        "an MLP tile's gate and up": 2 * mlp_tile * ffn * e,
        "attention's queries or output": t * heads * e,
        "attention's keys or values": t * kv * e,
        "attention's q, k and v": t * (heads + 2 * kv) * e,
        "a layer's input": t / layout.tp * card.hidden * e,
        "a layer's input in fp32": t / layout.tp * card.hidden * 4,
        "a layer's input, gathered over TP": float(t * card.hidden * e),
        "the weights": weights * e,
        "the gradients": weights * 4,
        "a state of the optimizer (fp32 weights or a moment)": states * 4,
        "the embedding or LM head": workload.vocabulary_weights * e,
        "the LM head's gradient in fp32": workload.vocabulary_weights * 4,
    }


def matching(workload: Workload, asked: float) -> list[str]:
    """Return the tensors of about `asked` bytes, the nearest first, each size once."""
    found: dict[float, tuple[float, str]] = {}
    for name, size in tensor_sizes(workload).items():
        off = min(abs(asked - size), abs(asked - -(-size // PAGE) * PAGE))
        if size >= PAGE and off <= SAME * asked:
            known = found.get(size)
            found[size] = (off, name if known is None else f"{known[1]}, {name}")
    return [name for _, name in sorted(found.values())]
