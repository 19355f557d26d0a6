# SPDX-License-Identifier: Apache-2.0
"""The angle by which a head is turned at millions of positions: ours, Megatron-Core's, exact.

    python -m benchmarks.rope_precision

Claim: at 1M, 4M and 16M positions ours is off by less than a millionth of a radian in every pair.

Exact is mpmath, 50 digits. Megatron-Core's table is what its `RotaryEmbedding` holds for a
position and its unfused path turns by: angles in fp32, cos and sin in the model's dtype. Of each
the angle is read back from cos and sin, so the error is that of the rotation itself.
"""

import argparse
import math
from pathlib import Path

import mpmath
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from custom_modules.cpu.backend import cpu_backend
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import inverse_frequencies, rotary_table

HEAD_DIM, BASE = 128, 500_000
POSITIONS = (2**17, 2**20, 2**22, 2**24)


def exact_turn(position: int) -> list[mpmath.mpf]:
    """Return the angle of each pair of dimensions, within a turn."""
    with mpmath.workdps(50):
        base, turn = mpmath.mpf(BASE), 2 * mpmath.pi
        angles = (position * base ** (mpmath.mpf(-2 * i) / HEAD_DIM) for i in range(HEAD_DIM // 2))
        return [angle - turn * mpmath.floor(angle / turn) for angle in angles]


def largest_error(cos: Tensor, sin: Tensor, position: int) -> float:
    """Return the largest distance in radians, over the pairs, from the exact angle."""
    angles = torch.atan2(sin.double(), cos.double()).flatten().tolist()
    apart = (a - float(b) for a, b in zip(angles, exact_turn(position), strict=True))
    return max(abs(math.remainder(distance, 2 * math.pi)) for distance in apart)


def ours(position: int) -> float:
    """Return the largest error of our table."""
    frequencies, _ = inverse_frequencies(RopeScaling.base_change(BASE), HEAD_DIM)
    return largest_error(*rotary_table(torch.tensor([[position]]), frequencies), position)


def megatron(position: int, dtype: torch.dtype) -> float:
    """Return the largest error of Megatron-Core's table in a model of this dtype."""
    with cpu_backend(force=True):
        embedding = RotaryEmbedding(HEAD_DIM, 1.0, rotary_base=BASE, use_cpu_initialization=True)
        angles = embedding.get_freqs_non_repeated(1, offset=position)
    return largest_error(angles.cos().to(dtype), angles.sin().to(dtype), position)


def main() -> None:
    """Print the table, and write it where asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rope_precision")
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    rows = [
        [
            "",
            f"{position:,}",
            f"{ours(position):.1e}",
            f"{megatron(position, torch.float32):.1e}",
            f"{megatron(position, torch.bfloat16):.1e}",
        ]
        for position in POSITIONS
    ]
    text = page(
        "Largest error of a rotation's angle, in radians",
        facts(["megatron-core", "mpmath"]),
        [
            f"Heads of {HEAD_DIM}, base {BASE:,}; the largest over the {HEAD_DIM // 2} pairs.",
            table(["", "position", "ours", "Megatron-Core fp32", "Megatron-Core bf16"], rows),
        ],
    )
    print(text, end="")
    if given.out is not None:
        write(given.out, text)


if __name__ == "__main__":
    main()
