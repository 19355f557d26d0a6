# SPDX-License-Identifier: Apache-2.0
"""Comparison of a rotation with the one a model was trained with: how far angles stay trained.

A pair of dimensions rotates by `distance * f` between two tokens. In training at `trained` tokens a
pair with a shorter wavelength `2 pi / f` has seen every angle; one with a longer wavelength only
those up to `trained * f`, and larger angles are new to the model (the out-of-distribution positions
of arXiv 2309.00071 and 2502.20082). A rotation that divides the frequency of such a pair by d keeps
distances up to `trained * d` within the trained angles, so the largest distance for all pairs is
`trained` times the least divisor among the long ones.
"""

import math
from dataclasses import dataclass

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import inverse_frequencies

UNCHANGED = 1.005
"""Divisors within this ratio of 1, or of the largest divisor, count as equal to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrequencyBands:
    """One rotation compared with the one that a model was trained with, pair by pair."""

    wavelengths: list[float]
    """Tokens of a whole turn, for each of the R/2 pairs; inf for a pair that does not rotate."""
    divisors: list[float]
    """Ratio of the model's own frequency to the new one, for each pair."""
    temperature: float
    largest_distance: float
    """Largest distance in tokens with trained angles for every pair; inf if there is no limit."""

    @property
    def kept(self) -> list[int]:
        """The pairs whose frequency is unchanged."""
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


def frequency_bands(
    own: RopeScaling, other: RopeScaling, head_dim: int, *, trained: int, length: int
) -> FrequencyBands:
    """Return how `other` rotates heads in sequences of `length` tokens, compared with `own`.

    `own` is the rotation that the model was trained with at `trained` tokens. Raises ValueError if
    the two do not rotate the same dimensions of a head.
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
    return FrequencyBands(
        wavelengths=(2 * math.pi / after).tolist(),
        divisors=divisors,
        temperature=temperature,
        largest_distance=trained * min(long) if long else math.inf,
    )
