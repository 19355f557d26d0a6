# SPDX-License-Identifier: Apache-2.0
"""The rotation that a model really uses, and its SHA-256; imports no torch.

    frequencies      radians a position, one a pair of rotated dimensions, as the model has them
    temperature      factor on cos and sin
    head_dim         dimensions of a head, of which twice the number of pairs turn
    interleaved      whether 2i pairs with 2i + 1, or i with i + R/2
    length           only if the frequencies depend on it: tokens of the sequences they are for
    long_frequencies, long_above     those of longer sequences, and the length above which they are
    layers           only if layers differ: which do and how, in words
    local            the rotation of local layers, if they have one of their own

A configuration says what should happen, this says what does: a builder that ignores a factor
leaves the configuration right and the frequencies wrong.

The SHA-256 is over one line of JSON without blanks, keys sorted, in ASCII: the fields above, with
each frequency and the temperature as a string in the form of "%.8e", 9 significant digits. Powers
and logarithms differ in the last of 16 digits between devices and versions of a library, which
this rounding hides. Two values that round apart all the same are compared as numbers, so a check
never depends on the hash alone: it identifies a rotation, `difference` decides.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

TOLERANCE = 1e-9
"""Relative difference of numbers computed in float64 that is none."""
EQUAL = 1e-4
"""Relative difference of two differences that makes the slower pair the one to name."""
SHOWN = 12
"""Characters of a SHA-256 that messages show."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RotationInEffect:
    """What a built model rotates by."""

    frequencies: tuple[float, ...]
    temperature: float
    head_dim: int
    interleaved: bool = False
    length: int | None = None
    long_frequencies: tuple[float, ...] = ()
    long_above: int | None = None
    layers: str = ""
    local: "RotationInEffect | None" = None

    @property
    def sha256(self) -> str:
        """The hash of the canonical form, in hexadecimal."""
        content: dict[str, Any] = {
            "frequencies": [_digits(each) for each in self.frequencies],
            "temperature": _digits(self.temperature),
            "head_dim": self.head_dim,
            "interleaved": self.interleaved,
            "length": self.length,
            "long_frequencies": [_digits(each) for each in self.long_frequencies],
            "long_above": self.long_above,
        }
        if self.layers:
            content["layers"] = self.layers
        if self.local is not None:
            content["local"] = self.local.sha256
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return sha256(text.encode("ascii")).hexdigest()

    @property
    def longest_wavelength(self) -> float:
        """Tokens in which the slowest pair turns once, in long sequences if they differ."""
        return 2 * math.pi / min(self.long_frequencies or self.frequencies)

    def describe(self) -> str:
        """Return the rotation in words."""
        at = "" if self.length is None else f" at {self.length:,} tokens"
        layers = f"; {self.layers}" if self.layers else ""
        return (
            f"{len(self.frequencies)} pairs, longest wavelength {self.longest_wavelength:,.0f} "
            f"tokens{at}, temperature {self.temperature:.6g}, SHA-256 {self.sha256[:SHOWN]}"
            f"{layers}"
        )

    def difference(
        self,
        expected: "RotationInEffect",
        *,
        tolerance: float = TOLERANCE,
        but_length: bool = False,
    ) -> str:
        """Return in words how this differs from what was expected; empty if it does not.

        With `but_length` the lengths that the two are for may differ.
        """
        whole = ("head_dim", "interleaved", "long_above", *(() if but_length else ("length",)))
        for name in whole:
            own, other = getattr(self, name), getattr(expected, name)
            if own != other:
                return f"{name} is {own} instead of {other}"
        if self.layers != expected.layers:
            return (
                f"the model has {self.layers or 'the same attention in all layers'} instead of "
                f"{expected.layers or 'the same attention in all layers'}"
            )
        turned = _turned(self.frequencies, expected.frequencies, tolerance) or _turned(
            self.long_frequencies,
            expected.long_frequencies,
            tolerance,
            f" in sequences above {self.long_above} tokens",
        )
        if turned:
            return turned
        if math.isclose(self.temperature, expected.temperature, rel_tol=tolerance):
            return self._of_local(expected, tolerance)
        return f"the temperature is {self.temperature:.6g} instead of {expected.temperature:.6g}"

    def _of_local(self, expected: "RotationInEffect", tolerance: float) -> str:
        """Return how the rotations of local layers differ; empty if they do not."""
        if self.local is None or expected.local is None:
            if self.local is expected.local:
                return ""
            has = "no rotation" if self.local is None else "a rotation"
            return f"local layers have {has} of their own, unlike what is expected"
        why = self.local.difference(expected.local, tolerance=tolerance)
        return f"in local layers {why}" if why else ""

    def summary(self) -> dict[str, Any]:
        """Return the SHA-256 and the figures that a reader checks by eye, ready for JSON."""
        content: dict[str, Any] = {
            "sha256": self.sha256,
            "pairs": len(self.frequencies),
            "rotated_share": 2 * len(self.frequencies) / self.head_dim,
            "longest_wavelength": self.longest_wavelength,
            "temperature": self.temperature,
            "interleaved": self.interleaved,
        }
        if self.layers:
            content["layers"] = self.layers
        return content if self.length is None else {**content, "length": self.length}

    def to_dict(self) -> dict[str, Any]:
        """Return the summary and all frequencies, ready for JSON, which `from_dict` reads."""
        content = {
            **self.summary(),
            "head_dim": self.head_dim,
            "frequencies": list(self.frequencies),
        }
        if self.long_above is not None:
            content |= {
                "long_above": self.long_above,
                "long_frequencies": list(self.long_frequencies),
            }
        if self.local is not None:
            content["local"] = self.local.to_dict()
        return content

    @classmethod
    def from_dict(cls, content: Any) -> "RotationInEffect":
        """Return what `to_dict` described; raise ValueError for a changed or incomplete one."""
        if not isinstance(content, Mapping):
            raise ValueError(f"it is {content!r}; expected an object")
        try:
            found = cls(
                frequencies=_numbers(content["frequencies"]),
                temperature=_number(content["temperature"]),
                head_dim=int(content["head_dim"]),
                interleaved=bool(content["interleaved"]),
                length=content.get("length"),
                long_frequencies=_numbers(content.get("long_frequencies", ())),
                long_above=content.get("long_above"),
                layers=str(content.get("layers", "")),
                local=None if content.get("local") is None else cls.from_dict(content["local"]),
            )
            stated = content["sha256"]
        except KeyError as error:
            raise ValueError(f"it has no {error.args[0]}") from None
        except TypeError as error:
            raise ValueError(str(error)) from None
        if stated != found.sha256:
            raise ValueError(
                f"its sha256 is {str(stated)[:SHOWN]} and that of its values {found.sha256[:SHOWN]}"
            )
        return found


def _turned(
    own: tuple[float, ...], other: tuple[float, ...], tolerance: float, where: str = ""
) -> str:
    """Return in words by which pair two sets of frequencies differ most; empty if by none."""
    if len(own) != len(other):
        return f"{len(own)} pairs turn instead of {len(other)}{where}"
    ratios = [abs(math.log(a / b)) for a, b in zip(own, other, strict=True)]
    worst = max(ratios, default=0.0)
    if worst <= tolerance:
        return ""
    pair = max(at for at, ratio in enumerate(ratios) if ratio >= worst * (1 - EQUAL))
    turned, wanted = (_tokens(2 * math.pi / each[pair]) for each in (own, other))
    return f"pair {pair + 1} of {len(own)} turns once in {turned} tokens instead of {wanted}{where}"


def _digits(value: float) -> str:
    return f"{value:.8e}"


def _tokens(wavelength: float) -> str:
    return f"{wavelength:,.0f}" if wavelength >= 1000 else f"{wavelength:.6g}"


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is not a number above 0")
    return float(value)


def _numbers(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list | tuple):
        raise ValueError(f"{values!r} is not a list of numbers")
    return tuple(_number(value) for value in values)
