# SPDX-License-Identifier: Apache-2.0
"""GeNE's rotation at its full scale, as an exportable `RopeScaling`; does not import torch.

    f_i = base ** (-2i/R) / factor ** w_i        w_i = min(1, i / beta)

R dimensions of a head are rotated, and beta is the first pair that makes fewer than `rotations`
turns in the context before extension: the fastest pair stays, those from beta on are divided by the
whole factor, between them the exponent grows linearly. A divisor for each pair is Hugging Face's
`longrope`, with the same divisors for short and long sequences and a temperature of 1. In training
the factor is drawn anew for every sample (`custom_modules.rope.skipped_positions.gene_scale`).

Source: 10.18653/v1/2024.findings-acl.249 and its repository, LhLi-QED/GeNE: gene_rope.py, class
InverseAngularVelocity, with num_rotations 3 as in all of its configs.
"""

import math

from custom_modules.rope.config import RopeScaling


def gene_rotation(
    *,
    base: float,
    factor: float,
    original_length: int,
    head_dim: int,
    partial_rotary_factor: float = 1.0,
    interleaved: bool = False,
    rotations: float = 3.0,
) -> RopeScaling:
    """Return the rotation that a stage of GeNE is evaluated with and exported as.

    R is `head_dim` times `partial_rotary_factor`, which like `interleaved` is the model's. Raises
    ValueError if R is odd, and if all pairs, or none, turn fewer than `rotations` times in
    `original_length` tokens.
    """
    rotated = int(head_dim * partial_rotary_factor)
    if rotated < 2 or rotated % 2:
        raise ValueError(
            f"head_dim is {head_dim} and partial_rotary_factor {partial_rotary_factor:g}, so "
            f"{rotated} dimensions turn; rotation pairs them, so they are even in number"
        )
    turns = [
        original_length * base ** (-2 * pair / rotated) / (2 * math.pi)
        for pair in range(rotated // 2)
    ]
    beta = next((pair for pair, turned in enumerate(turns) if turned < rotations), 0)
    if beta == 0:
        raise ValueError(
            f"of {rotated // 2} pairs at base {base:g} all or none make fewer than {rotations:g} "
            f"turns in {original_length:,} tokens; GeNE's exponents run from the first pair to the "
            "first such"
        )
    divisors = [factor ** min(1.0, pair / beta) for pair in range(rotated // 2)]
    return RopeScaling(
        method="longrope",
        base=base,
        factor=factor,
        original_length=original_length,
        partial_rotary_factor=partial_rotary_factor,
        interleaved=interleaved,
        attention_factor=1.0,
        short_factor=divisors,
        long_factor=list(divisors),
    )


def gene_refusal(scaling: RopeScaling) -> str | None:
    """Return why a rotation cannot be GeNE's at its full scale, or None."""
    if scaling.method != "longrope" or scaling.short_factor != scaling.long_factor:
        return (
            f"a scale drawn by GeNE takes a rotation with one divisor a pair for all lengths, and "
            f"rope is {scaling.method}; take custom_modules.rope.gene.gene_rotation"
        )
    if scaling.factor <= 1:
        return f"a scale drawn by GeNE runs up to rope factor, which is {scaling.factor:g}"
    return None
