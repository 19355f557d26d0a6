# SPDX-License-Identifier: Apache-2.0
"""A trained rotation stretched by a divisor a pair, beginning with YaRN's.

A rotation that was itself stretched before is stretched on from its own frequencies: divisors
multiply those it has, relative to plain RoPE, and the temperature multiplies its own. All
candidates turn at one temperature, YaRN's `0.1 ln(factor) + 1`, so that they differ in their
divisors alone; LongRoPE2 states none.
"""

from collections.abc import Sequence
from typing import Any

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import inverse_frequencies
from eval.rope_search.evolution import critical_pairs

DIGITS = 12
"""Kept of YaRN's divisors: quotients that are alike would else differ in the last, out of order."""


class Stretching:
    """The rotation of a model trained on `trained` tokens, on its way to `target`."""

    def __init__(self, rope: RopeScaling, head_dim: int, *, trained: int, target: int) -> None:
        """Take the rotation; raises ValueError for a target within reach, and methods by length."""
        if target <= trained:
            raise ValueError(
                f"the target is {target:,} tokens and the model was trained on {trained:,}; a "
                "search stretches, so name a longer one"
            )
        self.rope = rope
        self.trained = trained
        self.factor = target / trained
        if rope.by_length:
            raise ValueError(
                f"the model is rotated by {rope.method}, whose frequencies go by the length of the "
                "sequence; search from a stage before it"
            )
        self._of_both: dict[str, Any] = {
            "base": rope.base,
            "partial_rotary_factor": rope.partial_rotary_factor,
            "interleaved": rope.interleaved,
        }
        yarn = RopeScaling(
            method="yarn",
            **self._of_both,
            factor=self.factor,
            original_length=trained,
            before=None if rope.method == "default" else rope,
        )
        plain, _ = inverse_frequencies(RopeScaling(method="default", **self._of_both), head_dim)
        own, _ = inverse_frequencies(rope, head_dim)
        by_yarn, self.temperature = inverse_frequencies(yarn, head_dim)
        self.frequencies: list[float] = own.tolist()
        quotients: list[float] = (own / by_yarn).tolist()
        self.start = [round(each, DIGITS) for each in quotients]
        """YaRN's divisors of these frequencies."""
        self._before: list[float] = (plain / own).tolist()

    @property
    def critical(self) -> range:
        """The pairs from which on divisors may be searched."""
        return critical_pairs(self.frequencies, self.trained)

    def by(self, divisors: Sequence[float]) -> RopeScaling:
        """Return the rotation: frequencies as trained up to the trained length, stretched beyond.

        Its temperature is that of the stretched one at every length, as Hugging Face's longrope.
        """
        return RopeScaling(
            method="longrope",
            **self._of_both,
            factor=self.factor,
            original_length=self.trained,
            short_factor=list(self._before),
            long_factor=[a * b for a, b in zip(self._before, divisors, strict=True)],
            attention_factor=self.temperature,
        )
