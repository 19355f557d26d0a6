"""How positions are rotated: the description that training, evaluation and export share.

Light on purpose (no torch): recipes build it, `custom_modules.rope` turns it into frequencies.
"""

import math
from dataclasses import dataclass
from typing import Literal, Optional

RopeMethod = Literal["default", "llama3", "yarn"]


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
        if self.method == "default":
            if self.factor != 1.0:
                raise ValueError(
                    f"RoPE method default takes no factor, got {self.factor}; "
                    "use yarn, or raise the base"
                )
            return
        if not self.factor >= 1:
            raise ValueError(f"RoPE factor is {self.factor}; it must be at least 1")
        if self.original_length is None or self.original_length < 1:
            raise ValueError(
                f"RoPE method {self.method} needs original_length, the context in tokens "
                f"before extension; got {self.original_length}"
            )

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
