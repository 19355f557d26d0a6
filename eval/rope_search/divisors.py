# SPDX-License-Identifier: Apache-2.0
"""Stretch a trained rotation by one divisor per pair, starting from YaRN's.

A rotation that was already stretched is stretched further from its own frequencies: new divisors
multiply its existing ones, relative to plain RoPE, and the temperature multiplies its own. All
candidates have the same temperature, YaRN's `0.1 ln(factor) + 1`, so that they differ only in their
divisors; LongRoPE2 states none.
"""

from collections.abc import Sequence
from typing import Any

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import inverse_frequencies
from eval.rope_search.evolution import critical_pairs

DIGITS = 12
"""YaRN's divisors are rounded to these digits, so that equal quotients do not fall out of order."""


class Stretching:
    """The rotation of a model trained on `trained` tokens, to be stretched to `target`."""

    def __init__(self, rope: RopeScaling, head_dim: int, *, trained: int, target: int) -> None:
        """Raise ValueError for a target within reach, and for methods that depend on length."""
        if target <= trained:
            raise ValueError(
                f"the target is {target:,} tokens and the model was trained on {trained:,}; a "
                "search stretches the context, so name a longer target"
            )
        self.rope = rope
        self.trained = trained
        self.factor = target / trained
        if rope.by_length:
            raise ValueError(
                f"the model is rotated by {rope.method}, whose frequencies depend on the length of "
                "the sequence; search from a stage before it"
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
        """Candidates for the critical pair, from which on divisors are searched."""
        return critical_pairs(self.frequencies, self.trained)

    def by(self, divisors: Sequence[float]) -> RopeScaling:
        """Return the rotation: trained frequencies up to the trained length, stretched beyond.

        At every length its temperature is that of the stretched one, as in Hugging Face's longrope.
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
