# SPDX-License-Identifier: Apache-2.0
"""What a rotation does to a model trained with another: how far angles stay where they were.

A pair of dimensions turns by `distance * f` between two tokens. In training at `trained` tokens a
pair whose wavelength `2 pi / f` is shorter has turned by every angle; a longer one by those up to
`trained * f` alone, and larger angles are new to the model (the out-of-distribution positions of
arXiv 2309.00071 and 2502.20082). A rotation that divides the frequency of such a pair by d keeps
distances up to `trained * d` within the angles it knows, so the largest distance for all pairs is
`trained` times the least divisor among the long ones.
"""

import math
from dataclasses import dataclass

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import inverse_frequencies

UNCHANGED = 1.005
"""Divisors within this ratio of 1 count as 1; those within it of the largest count as that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """One rotation beside the one that a model was trained with, pair by pair."""

    wavelengths: list[float]
    """Tokens of a whole turn, for each of the R/2 pairs; inf where a pair does not turn."""
    divisors: list[float]
    """By how much each frequency is below the model's own."""
    temperature: float
    largest_distance: float
    """Tokens apart that every pair has seen the angle of; inf where all turn within training."""

    @property
    def kept(self) -> list[int]:
        """The pairs that turn as they did."""
        return [
            at for at, divisor in enumerate(self.divisors) if 1 / UNCHANGED <= divisor <= UNCHANGED
        ]

    @property
    def interpolated(self) -> list[int]:
        """The pairs slowed down the most."""
        most = max(self.divisors)
        return [
            at
            for at, divisor in enumerate(self.divisors)
            if divisor > UNCHANGED and divisor * UNCHANGED >= most
        ]

    @property
    def between(self) -> list[int]:
        """The pairs slowed down by less, or sped up."""
        ends = {*self.kept, *self.interpolated}
        return [at for at in range(len(self.divisors)) if at not in ends]


def stretch(
    own: RopeScaling, other: RopeScaling, head_dim: int, *, trained: int, length: int
) -> Stretch:
    """Return how `other` turns heads in sequences of `length` tokens, beside `own`.

    `own` is the rotation in which the model was trained at `trained` tokens. Raises ValueError
    where the two do not turn the same dimensions of a head.
    """
    before, _ = inverse_frequencies(own, head_dim, trained)
    after, temperature = inverse_frequencies(other, head_dim, length)
    if len(before) != len(after):
        raise ValueError(
            f"the model turns {2 * len(before)} dimensions of a head and {other.method} "
            f"{2 * len(after)}; set partial_rotary_factor to {own.partial_rotary_factor}"
        )
    divisors = (before / after).tolist()
    long = [
        divisor
        for divisor, frequency in zip(divisors, before.tolist(), strict=True)
        if 2 * math.pi / frequency > trained
    ]
    return Stretch(
        wavelengths=(2 * math.pi / after).tolist(),
        divisors=divisors,
        temperature=temperature,
        largest_distance=trained * min(long) if long else math.inf,
    )
