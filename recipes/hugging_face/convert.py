# SPDX-License-Identifier: Apache-2.0
"""Convert the tensors of a `WeightShard` in both directions by copying, bit for bit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from recipes.hugging_face.weight_map import WeightShard
from recipes.spec.model_card import ModelCard

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Torch dtypes by their names in safetensors."""
WORDS = {dtype: word for word, dtype in DTYPES.items()}


def to_megatron(piece: WeightShard, tensors: Sequence[Tensor], card: ModelCard) -> Tensor:
    """Return Megatron's part from Hugging Face's tensors, in their order in the piece."""
    if piece.kind == "qkv":
        rest = tensors[0].shape[1:]
        groups = [t.view(card.kv_heads, -1, card.head_dim, *rest) for t in tensors]
        return torch.cat(groups, dim=1).reshape(piece.shape)
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def to_hugging_face(piece: WeightShard, part: Tensor, card: ModelCard) -> list[Tensor]:
    """Return Hugging Face's tensors, contiguous, from Megatron's part, padded or not."""
    if piece.kind == "qkv":
        queries = card.heads // card.kv_heads
        groups = part.view(card.kv_heads, queries + 2, card.head_dim, *part.shape[1:])
        split = groups.split((queries, 1, 1), dim=1)
        return [t.reshape(shape).contiguous() for t, shape in zip(split, piece.shapes, strict=True)]
    rows = [shape[0] for shape in piece.shapes]
    return [t.contiguous() for t in part[: sum(rows)].split(rows)]


def content(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
