# SPDX-License-Identifier: Apache-2.0
"""Positions for "train short, test long": a sequence of S tokens that is rotated like one of T.

    positions = arange(S) + skip        skip >= 0, never falling, positions[-1] < T

RoPE depends only on differences of positions. A model trained on S tokens has seen distances below
S; at T > S tokens it meets others. With skipped positions a short sequence has long distances, at
the cost of the short one: attention stays causal by index, and nothing else changes.

* `pose` cuts the sequence into a few chunks and skips between them (PoSE, arXiv 2309.10400,
  section 3.2, chunk lengths as in its figure 6): skip of chunk 0 is 0, of chunk i drawn from
  {skip of i-1, ..., T - S}. The text continues across a skip (the paper's v_i = 0; its table 4).
* `longrecipe` skips between sentences (LongRecipe, arXiv 2409.00509, section 4.2, drawn as its
  released FSProcessor.py and preprocess_data.py do): with n sentences, n of T - S + n slots are
  drawn and sorted, and sentence k >= 1 is skipped by slot_k - k. All draws are equally probable,
  the skips are not: that of sentence 0 is dropped after the draw, so that those whose first is
  skip_1 have skip_1 + 1 draws. Then a first part of 1 to (S + 1) // 2 tokens gets consecutive
  positions again.

GeNE (10.18653/v1/2024.findings-acl.249) keeps the positions and draws the interpolation: pair
i rotates by base ** (-2i/R) / r ** w_i (`custom_modules.rope.gene` has w). `gene_scale` draws r,
from ceil(S / L) and its multiples up to the factor that evaluation uses, L the context before
extension, as the repository's RandomScale; `gene_frequencies` gives the frequencies at r from the
rotation of the evaluation.

All random numbers come from a given generator on the CPU, so ranks that share a sequence draw the
same values if their generators have the same seed. Legend: S tokens of a sequence, T target length,
R rotated dimensions of a head.
"""

import math

import torch
from torch import Generator, Tensor

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.gene import gene_refusal
from custom_modules.rope.rotary import Rotation, inverse_frequencies


def pose(tokens: Tensor, generator: Generator, *, target_length: int, chunks: int = 2) -> Tensor:
    """Return positions, int64 [S], in `chunks` runs; PoSE (arXiv 2309.10400).

    Only the length of `tokens` [S] matters. Raises ValueError if T is below S, or S below the
    number of chunks.
    """
    length = len(tokens)
    room = _room(length, target_length)
    if not 1 <= chunks <= length:
        raise ValueError(
            f"chunks is {chunks} and the sequence has {length:,} tokens; each chunk has at least 1"
        )
    skips, skip = torch.empty(length, dtype=torch.int64), 0
    start = 0
    for chunk in range(chunks):
        after = chunks - chunk - 1  # chunks still to come, of at least one token each
        left = length - start
        size = _draw(1, left - after, generator) if after else left
        if chunk:
            skip = _draw(skip, room, generator)
        skips[start : start + size] = skip
        start += size
    return torch.arange(length) + skips


def longrecipe(sentence_starts: Tensor, generator: Generator, *, target_length: int) -> Tensor:
    """Return positions, int64 [S], that skip between sentences; LongRecipe (arXiv 2409.00509).

    `sentence_starts` [S] is true at the first token of each. Raises ValueError if T is below S.
    """
    length = len(sentence_starts)
    room = _room(length, target_length)
    starts = sentence_starts.bool().clone()
    starts[0] = True
    sentences = int(starts.sum())
    slots = torch.randperm(room + sentences, generator=generator)[:sentences].sort().values
    skips = slots - torch.arange(sentences)
    skips[0] = 0
    positions = torch.arange(length) + skips[starts.cumsum(0) - 1]
    together = _draw(1, (length + 1) // 2, generator)
    positions[:together] = torch.arange(together)
    return positions


def gene_scale(tokens: Tensor, generator: Generator, *, least: int, scales: int) -> int:
    """Return GeNE's interpolation scale of a sample: `least` times one of 1 to `scales`.

    Up to four are equally probable; of more, the first and the last have 1/4 each and the others
    share 1/2 (the repository's `pdf`). `tokens` are not used.
    """
    if least < 1 or scales < 1:
        raise ValueError(f"least is {least} and scales {scales}; both are at least 1")
    weights = torch.ones(scales, dtype=torch.float64)
    if scales > 4:
        weights[:] = 0.5 / (scales - 2)
        weights[0] = weights[-1] = 0.25
    return least * (1 + int(torch.multinomial(weights, 1, generator=generator)))


def gene_frequencies(scaling: RopeScaling, head_dim: int, scale: float) -> Tensor:
    """Return radians per position, float64 [R/2], of GeNE's rotation at another scale.

    `scaling` is the one at its full scale, as `gene_rotation` makes it: divisors factor ** w.
    Raises ValueError for any other rotation, and for scales outside of 1 to its factor.
    """
    if (why := gene_refusal(scaling)) is not None:
        raise ValueError(why)
    if not 1 <= scale <= scaling.factor:
        raise ValueError(f"the scale is {scale:g}; it lies between 1 and factor {scaling.factor:g}")
    assert scaling.long_factor is not None
    full, _ = inverse_frequencies(scaling, head_dim, scaling.original_length)
    divisors = torch.tensor(scaling.long_factor, dtype=torch.float64)
    return full * divisors ** (1 - math.log(scale) / math.log(scaling.factor))


def scaled_table(rotation: Rotation, position_ids: Tensor, length: int, scales: Tensor) -> Tensor:
    """Return cos and sin, fp32 [2, s, b, 1, R/2], each sequence of [b, s] at its own scale [b].

    `length` is that of the sequences over all ranks that share them; `scales` are on the CPU.
    """
    rows = []
    for row, scale in zip(position_ids, scales.tolist(), strict=True):
        frequencies = gene_frequencies(rotation.scaling, rotation.head_dim, scale)
        rows.append(rotation.table(row[None], length, frequencies.to(row.device)))
    return torch.cat(rows, dim=2)


def _room(length: int, target_length: int) -> int:
    """Return the number of positions that a sequence leaves free."""
    if target_length < length:
        raise ValueError(
            f"target_length is {target_length:,} and the sequence has {length:,} tokens; "
            "the target is at least as long"
        )
    return target_length - length


def _draw(low: int, high: int, generator: Generator) -> int:
    """Return an integer from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))
