# SPDX-License-Identifier: Apache-2.0
"""How positions are rotated: the description that training, evaluation and export share.

Light on purpose (no torch): recipes build it, `custom_modules.rope` turns it into frequencies.
"""

import math
from dataclasses import dataclass
from typing import Literal, Optional

RopeMethod = Literal["default", "llama3", "yarn"]

_YARN = ("beta_fast", "beta_slow", "attention_factor")
_LLAMA3 = ("low_freq_factor", "high_freq_factor")
_WITHOUT_EFFECT: dict[str, tuple[str, ...]] = {
    "default": ("factor", "original_length", *_YARN, *_LLAMA3),
    "llama3": _YARN,
    "yarn": _LLAMA3,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """One method with its parameters, in the notation of Hugging Face's `rope_scaling`.

    `base` is theta of RoPE (arXiv 2104.09864). `default` rotates by it alone, so a base change
    (arXiv 2309.16039) is `default` with a larger base. The other methods stretch `factor` times
    the `original_length`.
    """

    method: RopeMethod
    base: float
    factor: float = 1.0
    # Optional[...] here: nemo-run 0.11.1 cannot parse an override of a field annotated `X | None`.
    original_length: Optional[int] = None  # noqa: UP045
    """Context in tokens that the frequencies were trained on; never a table size."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: Optional[float] = None  # noqa: UP045
    """YaRN's temperature on cos and sin; None is the paper's `0.1 ln(factor) + 1`."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        """Refuse values outside the method's domain."""
        if self.method not in ("default", "llama3", "yarn"):
            raise ValueError(
                f"RoPE method {self.method!r} is unknown; choose default, llama3 or yarn"
            )
        if not self.base > 1:
            raise ValueError(f"RoPE base is {self.base}; it must be above 1")
        unused = [name for name in _WITHOUT_EFFECT[self.method] if self._is_set(name)]
        if unused:
            raise ValueError(
                f"{', '.join(unused)} has no effect on RoPE method {self.method}; leave it out, "
                "or choose the method that uses it"
            )
        if self.method == "default":
            return
        if not self.factor >= 1:
            raise ValueError(f"RoPE factor is {self.factor}; it must be at least 1")
        if self.original_length is None or self.original_length < 1:
            raise ValueError(
                f"RoPE method {self.method} needs original_length, the context in tokens "
                f"before extension; got {self.original_length}"
            )
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(
                f"beta_fast is {self.beta_fast} and beta_slow {self.beta_slow}; YaRN's ramp runs "
                "from the larger to the smaller, both above 0"
            )
        if not self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor} and low_freq_factor "
                f"{self.low_freq_factor}; the first must be the larger, both above 0"
            )
        if self.attention_factor is not None and not self.attention_factor > 0:
            raise ValueError(f"attention_factor is {self.attention_factor}; it must be above 0")

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).__dataclass_fields__[name].default)

    @classmethod
    def base_change(cls, base: float) -> "RopeScaling":
        """Plain RoPE at another base (ABF, "NTK by base")."""
        return cls(method="default", base=base)

    @classmethod
    def yarn(cls, *, base: float, factor: float, original_length: int) -> "RopeScaling":
        """YaRN (arXiv 2309.00071) with the temperature of the paper."""
        return cls(method="yarn", base=base, factor=factor, original_length=original_length)

    @classmethod
    def llama3(
        cls, *, base: float = 500_000.0, factor: float = 8.0, original_length: int = 8192
    ) -> "RopeScaling":
        """Llama-3.1's piecewise scaling, the defaults as in its published config."""
        return cls(method="llama3", base=base, factor=factor, original_length=original_length)

    @property
    def temperature(self) -> float:
        """The factor on cos and sin; attention logits are scaled by its square."""
        if self.method != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0
