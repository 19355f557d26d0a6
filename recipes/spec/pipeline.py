# SPDX-License-Identifier: Apache-2.0
"""Layers of each pipeline stage.

If the stages do not divide the layers, embedding and LM head count as a layer each, so the first
and the last stage have one layer fewer than the others, as in the training of Llama 3.1 405B (arXiv
2407.21783, section 3.3.2): its 126 layers on 8 stages are 15, 16, ... 16, 15.

An interleaved pipeline divides the layers into PP x VPP chunks, and rank r of PP has the chunks r,
r + PP, r + 2 PP, ... (arXiv 2104.04473, section 2.2).
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain


def is_uneven(layers: int, pp: int, vpp: int = 1) -> bool:
    """Whether the first and the last chunk have one layer fewer than the others."""
    return layers % (pp * vpp) > 0


def divides(pp: int, layers: int, vpp: int = 1) -> bool:
    """Whether layers can be divided into PP x VPP chunks, evenly or with shorter ends."""
    chunks = pp * vpp
    return layers % chunks == 0 or ((layers + 2) % chunks == 0 and layers + 2 >= 2 * chunks)


@lru_cache(maxsize=256)
def stages(layers: int, pp: int, vpp: int = 1) -> tuple[Sequence[int], ...]:
    """Return the numbers of each stage's layers, from 1; PP x VPP divides them."""
    count = pp * vpp
    ends = int(is_uneven(layers, pp, vpp))
    each = (layers + 2 * ends) // count
    cuts = [0, *(each * chunk - ends for chunk in range(1, count)), layers]
    chunks = tuple(range(cuts[n] + 1, cuts[n + 1] + 1) for n in range(count))
    if vpp == 1:
        return chunks
    return tuple(tuple(chain.from_iterable(chunks[rank::pp])) for rank in range(pp))


def chunks_in_flight(pp: int, vpp: int, rank: int, micro_batches: int) -> int:
    """Return the most chunks of a rank that wait for their backward at a time.

    Without interleaving PP - rank micro-batches (1F1B). Interleaved, Megatron-Core runs the
    forwards of 2 (PP - rank - 1) + (VPP - 1) PP chunks before the first backward, and one more.
    """
    if vpp == 1:
        return min(pp - rank, micro_batches)
    return min(2 * (pp - rank - 1) + (vpp - 1) * pp + 1, micro_batches * vpp)
