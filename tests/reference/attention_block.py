# SPDX-License-Identifier: Apache-2.0
"""The attention of a layer from its input to its heads: projection, norms, rotation, attention."""

import torch
from torch import Tensor

from tests.reference.attention import Lengths, attention
from tests.reference.norm import rms_norm
from tests.reference.rope import rotated


def attention_block(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    table: tuple[Tensor, Tensor] | None,
    *,
    heads: int,
    kv_heads: int,
    eps: float,
    causal: bool,
    documents: Lengths | None,
) -> Tensor:
    """Return [s, b, h, D] for x [s, b, hidden] and a weight [(h + 2g) * D, hidden].

    Rows of the weight stand in Megatron's order: for each KV head the query heads that share it,
    then its key, then its value. `norms` are the weights [D] of queries and keys, `table` is cos
    and sin [s, b, 1, D/2].
    """
    projected = x @ weight.t() if bias is None else x @ weight.t() + bias
    rows = list(projected.chunk(heads + 2 * kv_heads, dim=2))
    q, k, v = [], [], []
    for _ in range(kv_heads):
        q += [rows.pop(0) for _ in range(heads // kv_heads)]
        k.append(rows.pop(0))
        v.append(rows.pop(0))
    queries, keys, values = (torch.stack(of, dim=2) for of in (q, k, v))
    if norms is not None:
        queries, keys = rms_norm(queries, norms[0], eps), rms_norm(keys, norms[1], eps)
    if table is not None:
        queries, keys = rotated(queries, *table), rotated(keys, *table)
    out, _ = attention(
        *(t.permute(1, 2, 0, 3) for t in (queries, keys, values)),
        causal=causal,
        documents=documents,
    )
    return out.permute(2, 0, 1, 3)
