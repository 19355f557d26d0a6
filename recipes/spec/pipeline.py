# SPDX-License-Identifier: Apache-2.0
"""Layers of each pipeline stage.

If the stages do not divide the layers, embedding and LM head count as a layer each, so the first
and the last stage have one layer fewer than the others, as in the training of Llama 3.1 405B (arXiv
2407.21783, section 3.3.2): its 126 layers on 8 stages are 15, 16, ... 16, 15.
"""

from functools import lru_cache


def is_uneven(layers: int, pp: int) -> bool:
    """Whether the first and the last stage have one layer fewer than the others."""
    return layers % pp > 0


def divides(pp: int, layers: int) -> bool:
    """Whether layers can be divided into `pp` stages, evenly or with shorter ends."""
    return layers % pp == 0 or ((layers + 2) % pp == 0 and layers + 2 >= 2 * pp)


@lru_cache(maxsize=256)
def stages(layers: int, pp: int) -> tuple[range, ...]:
    """Return the numbers of each stage's layers, from 1; `pp` divides them."""
    ends = int(is_uneven(layers, pp))
    each = (layers + 2 * ends) // pp
    cuts = [0, *(each * stage - ends for stage in range(1, pp)), layers]
    return tuple(range(cuts[n] + 1, cuts[n + 1] + 1) for n in range(pp))
