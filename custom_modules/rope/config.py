# SPDX-License-Identifier: Apache-2.0
"""Configuration of the position rotation, shared by training, evaluation and export.

Does not import torch: recipes build it, `custom_modules.rope.rotary` turns it into frequencies.

| method | frequencies | source |
| --- | --- | --- |
| default | base ** (-2i/R); a larger base is ABF, "NTK by base" | 2104.09864, 2309.16039 |
| linear | all divided by factor: position interpolation | 2306.15595 |
| ntk | of the base times factor ** (R / (R - 2)) | NTK-aware scaling, bloc97 2023 |
| dynamic | the same, its factor growing with the sequence from 1 | emozilla 2023 |
| ntk_by_parts | slow ones divided by factor, fast ones kept, a ramp between | 2309.00071 |
| yarn | the same, and a temperature on attention | 2309.00071 |
| llama3 | the same idea, by wavelength | 2407.21783 |
| longrope | each divided by its own factor, found by search | 2402.13753, 2502.20082 |

R is the number of dimensions rotated. The source of a number is an arXiv id.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Optional, get_args

RopeMethod = Literal[
    "default", "linear", "ntk", "dynamic", "ntk_by_parts", "yarn", "llama3", "longrope"
]
MAX_POSITION = 2**31
"""Positions below it are rotated exactly; those above are refused at their source."""

_EXTENDS = ("factor", "original_length", "before")
_RAMP = (*_EXTENDS, "beta_fast", "beta_slow", "truncate")
_USES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": _EXTENDS,
    "ntk": _EXTENDS,
    "dynamic": ("factor", "original_length"),
    "ntk_by_parts": _RAMP,
    "yarn": (*_RAMP, "attention_factor", "mscale", "mscale_all_dim"),
    "llama3": (*_EXTENDS, "low_freq_factor", "high_freq_factor"),
    "longrope": (*_EXTENDS, "attention_factor", "short_factor", "long_factor"),
}
_MAY_BE_UNSET = ("attention_factor", "mscale", "mscale_all_dim")
_NUMBERS = (
    "base",
    "factor",
    "partial_rotary_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    *_MAY_BE_UNSET,
)
_OF_EVERY_METHOD = ("method", "base", "partial_rotary_factor", "interleaved")
COMPOSABLE = ("default", "linear", "ntk", "ntk_by_parts", "yarn", "llama3")
"""Methods that another may stretch further: one set of frequencies, falling with the dimension."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """One method with its parameters, in the notation of Hugging Face's `rope_scaling`.

    `base` is theta of RoPE. Every method but `default` stretches `factor` times the
    `original_length`. Raises ValueError for values of another type or outside the domain of the
    method, and for parameters that have no effect on it; but one `mscale` alone, or both together
    with an `attention_factor`, is accepted as in Hugging Face.
    """

    method: RopeMethod
    base: float
    factor: float = 1.0
    # Optional[...] here: nemo-run 0.11.1 cannot parse an override of a field annotated `X | None`.
    original_length: Optional[int] = None  # noqa: UP045
    """Context in tokens that the frequencies were trained on; never a table size."""
    partial_rotary_factor: float = 1.0
    """Share of a head's dimensions that are rotated, the first ones; the others are unchanged."""
    interleaved: bool = False
    """Whether dimension 2i pairs with 2i + 1 (GPT-J), or i with i + R/2 (Llama)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the ends of YaRN's ramp are whole dimensions."""
    attention_factor: Optional[float] = None  # noqa: UP045
    """Temperature on cos and sin; None is the method's own (`temperature`)."""
    mscale: Optional[float] = None  # noqa: UP045
    mscale_all_dim: Optional[float] = None  # noqa: UP045
    """YaRN's temperature is the ratio of the two if both are set, as in Hugging Face; one alone has
    no effect. Both 1 switch the temperature off."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: Optional[list[float]] = None  # noqa: UP045
    """LongRoPE's divisor of each frequency, R/2 of them, up to the original length."""
    long_factor: Optional[list[float]] = None  # noqa: UP045
    """The same for sequences that are longer."""
    before: Optional["RopeScaling"] = None
    """Rotation of the model that this one stretches further, if that is not plain RoPE: its
    frequencies replace those of the base, its temperature multiplies this one's."""

    def __post_init__(self) -> None:
        """Refuse values outside the method's domain."""
        if self.method not in get_args(RopeMethod):
            *most, last = get_args(RopeMethod)
            raise ValueError(
                f"RoPE method {self.method!r} is unknown; choose {', '.join(most)} or {last}"
            )
        self._require_types()
        if not 1 < self.base < math.inf:
            raise ValueError(f"RoPE base is {self.base}; it must be above 1, and a number")
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(
                f"partial_rotary_factor is {self.partial_rotary_factor}; it is a share, above 0 "
                "and at most 1"
            )
        unused = [name for name in self.non_default_fields() if name not in self._used()]
        if unused:
            raise ValueError(
                f"{', '.join(unused)} has no effect on RoPE method {self.method}; leave it out, "
                "or choose the method that uses it"
            )
        if self.method != "default":
            self._require_extension()
            self._require_parameters()

    def _require_types(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is None and name in _MAY_BE_UNSET:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} is {value!r}; it takes a number")
        if not (self.original_length is None or type(self.original_length) is int):
            raise ValueError(
                f"original_length is {self.original_length!r}; it takes a whole number of tokens"
            )
        for name in ("interleaved", "truncate"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it is true or false")

    def _require_extension(self) -> None:
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"RoPE factor is {self.factor}; it must be at least 1")
        if self.original_length is None or self.original_length < 1:
            raise ValueError(
                f"RoPE method {self.method} needs original_length, the context in tokens "
                f"before extension; got {self.original_length}"
            )
        if self.before is None:
            return
        if self.before.method not in COMPOSABLE:
            raise ValueError(
                f"RoPE method {self.method} cannot stretch {self.before.method}, whose frequencies "
                f"do not fall monotonically; it stretches {', '.join(COMPOSABLE)}"
            )
        for name in ("base", "partial_rotary_factor", "interleaved"):
            outer, inner = getattr(self, name), getattr(self.before, name)
            if outer != inner:
                raise ValueError(
                    f"{name} is {outer} and that of the rotation it is stretched from {inner}; "
                    "it is one fact of the model, so set both to one value"
                )

    def _require_parameters(self) -> None:
        if not math.inf > self.beta_fast > self.beta_slow > 0:
            raise ValueError(
                f"beta_fast is {self.beta_fast} and beta_slow {self.beta_slow}; YaRN's ramp runs "
                "from the larger to the smaller, both above 0"
            )
        if not math.inf > self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor} and low_freq_factor "
                f"{self.low_freq_factor}; the first must be the larger, both above 0"
            )
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be above 0, or left out")
        if self.method == "longrope":
            self._require_factors()

    def _require_factors(self) -> None:
        short, long = self.short_factor, self.long_factor
        if short is None or long is None:
            raise ValueError(
                "RoPE method longrope needs short_factor and long_factor, a divisor of each "
                "frequency; `longhaul rope search` finds them"
            )
        for name, value in (("short_factor", short), ("long_factor", long)):
            if not isinstance(value, list | tuple):
                raise ValueError(f"{name} is {value!r}; it is a list, one number a pair")
        if len(short) != len(long):
            raise ValueError(
                f"short_factor has {len(short)} numbers and long_factor {len(long)}; each is one "
                "a pair of dimensions"
            )
        wrong = [
            value
            for value in (*short, *long)
            if isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ]
        if wrong:
            raise ValueError(f"a factor of longrope is {wrong[0]!r}; each is a number above 0")
        if self.original_length == 1 and self.attention_factor is None and self.factor > 1:
            raise ValueError(
                "longrope's temperature divides by the logarithm of original_length, which is 1; "
                "state attention_factor"
            )

    def _used(self) -> tuple[str, ...]:
        return (*_OF_EVERY_METHOD, *_USES[self.method])

    def non_default_fields(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, by name."""
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON, that `from_dict` reads."""
        content = self.non_default_fields()
        if self.before is not None:
            content["before"] = self.before.to_dict()
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "RopeScaling":
        """Return the rotation that `to_dict` described; raises ValueError for another key."""
        known = {field.name for field in fields(cls)}
        for name in content:
            if name not in known:
                raise ValueError(f"a rotation has no {name!r}; it has {', '.join(sorted(known))}")
        for name in ("method", "base"):
            if name not in content:
                raise ValueError(f"a rotation needs {name}; got {', '.join(content) or 'nothing'}")
        inner = content.get("before")
        return cls(**{**content, "before": None if inner is None else cls.from_dict(inner)})

    @classmethod
    def base_change(cls, base: float) -> "RopeScaling":
        """Plain RoPE at another base (ABF, "NTK by base")."""
        return cls(method="default", base=base)

    @classmethod
    def linear(cls, *, base: float, factor: float, original_length: int) -> "RopeScaling":
        """Position interpolation (arXiv 2306.15595)."""
        return cls(method="linear", base=base, factor=factor, original_length=original_length)

    @classmethod
    def ntk(cls, *, base: float, factor: float, original_length: int) -> "RopeScaling":
        """NTK-aware scaling, fixed: the base at which the slowest dimension is interpolated."""
        return cls(method="ntk", base=base, factor=factor, original_length=original_length)

    @classmethod
    def dynamic(cls, *, base: float, factor: float, original_length: int) -> "RopeScaling":
        """NTK-aware scaling by the current sequence's length, as Hugging Face's `dynamic`."""
        return cls(method="dynamic", base=base, factor=factor, original_length=original_length)

    @classmethod
    def ntk_by_parts(cls, *, base: float, factor: float, original_length: int) -> "RopeScaling":
        """YaRN's frequencies without its temperature."""
        return cls(method="ntk_by_parts", base=base, factor=factor, original_length=original_length)

    @classmethod
    def yarn(
        cls,
        *,
        base: float,
        factor: float,
        original_length: int,
        before: Optional["RopeScaling"] = None,
    ) -> "RopeScaling":
        """YaRN (arXiv 2309.00071) with the temperature of the paper."""
        return cls(
            method="yarn", base=base, factor=factor, original_length=original_length, before=before
        )

    @classmethod
    def llama3(
        cls, *, base: float = 500_000.0, factor: float = 8.0, original_length: int = 8192
    ) -> "RopeScaling":
        """Llama-3.1's piecewise scaling, the defaults as in its published config."""
        return cls(method="llama3", base=base, factor=factor, original_length=original_length)

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the length of the current sequence."""
        return self.method in ("dynamic", "longrope")

    @property
    def reach(self) -> int | None:
        """The context in tokens that the method stretches to; None for plain RoPE."""
        if self.original_length is None:
            return None
        return math.floor(self.original_length * self.factor)

    @property
    def temperature(self) -> float:
        """The factor on cos and sin; attention logits are scaled by its square."""
        inner = 1.0 if self.before is None else self.before.temperature
        return inner * self._own_temperature

    @property
    def _own_temperature(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.method == "longrope" and self.factor > 1:
            assert self.original_length is not None
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
        if self.method != "yarn":
            return 1.0
        growth = 0.1 * math.log(self.factor)
        if self.mscale is not None and self.mscale_all_dim is not None:
            return (growth * self.mscale + 1) / (growth * self.mscale_all_dim + 1)
        return growth + 1.0
