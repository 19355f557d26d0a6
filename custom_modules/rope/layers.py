# SPDX-License-Identifier: Apache-2.0
"""Layers that differ: a window, another rotation, or none, by a period. Does not import torch.

Layers are numbered from 1. Every `every`-th one is *full*: its tokens attend to all before them.
The others are *local*; of the published families

| family | full | local |
| --- | --- | --- |
| SmolLM3 | every 4th, not rotated | over the whole context too, rotated |
| Olmo 3 (arXiv 2512.13961) | every 4th, YaRN when extended | window of 4,096, plain RoPE |
| Gemma 3 (arXiv 2503.19786) | every 6th, base 1M | window of 512 or 1,024, base 10K |

The rotation of a stage is that of the layers that rotate and have no rotation of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Optional

from custom_modules.rope.config import RopeScaling

Turn = Literal["stage", "local", "none"]
"""By what a layer rotates: the rotation of the stage, that of local layers, or nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPattern:
    """Which layers of a model differ, and how.

    Raises ValueError for a pattern in which no layer differs, and for values out of range.
    """

    every: int
    """Distance of full layers; the first is layer number `every`."""
    # Optional[...] here: nemo-run 0.11.1 cannot parse an override of a field annotated `X | None`.
    window: Optional[int] = None  # noqa: UP045
    """Tokens that a token of a local layer attends to, itself included; None: all before it."""
    local_rope: Optional[RopeScaling] = None  # noqa: UP045
    """Rotation of local layers, which no stage changes; None: the stage's."""
    full_rotates: bool = True
    """Whether full layers rotate."""

    def __post_init__(self) -> None:
        """Refuse values out of range, and a pattern without an effect."""
        for name, least in (("every", 2), ("window", 1)):
            value = getattr(self, name)
            if value is None and name == "window":
                continue
            if type(value) is not int or value < least:
                raise ValueError(f"{name} of a layer pattern is {value!r}; it is at least {least}")
        if self.window is None and self.local_rope is None and self.full_rotates:
            raise ValueError(
                f"no layer differs in the pattern with every {self.every}; give a window, a "
                "local_rope, or full_rotates false, or leave the pattern out"
            )
        if self.local_rope is not None and not self.full_rotates:
            raise ValueError(
                "full_rotates is false and local layers have a rotation of their own, so a stage's "
                "would turn no layer; leave one of the two out"
            )
        if self.local_rope is not None and self.local_rope.by_length:
            raise ValueError(
                f"local_rope is {self.local_rope.method}, which depends on the sequence's length; "
                "a rotation of local layers does not"
            )

    def is_full(self, layer: int) -> bool:
        """Whether the layer of this number, from 1, is a full one."""
        return layer % self.every == 0

    def window_of(self, layer: int) -> int | None:
        """Return the window of a layer; None if its tokens attend to all before them."""
        return None if self.is_full(layer) else self.window

    def turn_of(self, layer: int) -> Turn:
        """Return by what a layer rotates."""
        if self.is_full(layer):
            return "stage" if self.full_rotates else "none"
        return "stage" if self.local_rope is None else "local"

    def full_layers(self, layers: int, first: int = 1) -> int:
        """Return how many of `layers` layers from number `first` on are full."""
        return (first + layers - 1) // self.every - (first - 1) // self.every

    def attended_length(self, seq_length: float, layers: int) -> float:
        """Return the sum over layers of the sequence length whose causal attention does their work.

        In a window of W of S tokens there are W S - W^2 / 2 pairs of a query and a key, as in
        causal attention over 2 W - W^2 / S tokens.
        """
        full = self.full_layers(layers)
        window = self.window
        local = seq_length
        if window is not None and window < seq_length:
            local = 2 * window - window**2 / seq_length
        return full * seq_length + (layers - full) * local

    def describe(self, *, base: bool = True) -> str:
        """Return the pattern in words, with the base of local layers unless that is told apart."""
        local = [] if self.window is None else [f"a window of {self.window:,} tokens"]
        if self.local_rope is not None:
            of_base = f" of base {self.local_rope.base:,.0f}" if base else ""
            method = self.local_rope.method
            by_method = "" if method == "default" else f" by {method}"
            local.append(f"a rotation{by_method}{of_base} of their own")
        said = f"full attention in every {ordinal(self.every)} layer"
        if not self.full_rotates:
            said = f"no rotation in every {ordinal(self.every)} layer"
        return said + (f"; the others have {' and '.join(local)}" if local else "")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON, that `from_dict` reads."""
        content: dict[str, Any] = {"every": self.every}
        if self.window is not None:
            content["window"] = self.window
        if self.local_rope is not None:
            content["local_rope"] = self.local_rope.to_dict()
        if not self.full_rotates:
            content["full_rotates"] = False
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "LayerPattern":
        """Return the pattern that `to_dict` described; raise ValueError for another key."""
        known = ("every", "window", "local_rope", "full_rotates")
        for name in content:
            if name not in known:
                raise ValueError(f"a layer pattern has no {name!r}; it has {', '.join(known)}")
        if "every" not in content:
            raise ValueError("a layer pattern needs every, the distance of full layers")
        own = content.get("local_rope")
        given = {**content, "local_rope": None if own is None else RopeScaling.from_dict(own)}
        return cls(**given)


_ENDS = {1: "st", 2: "nd", 3: "rd"}


def ordinal(number: int) -> str:
    """Return a number as in "every 4th"."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{_ENDS.get(number % 10, 'th')}"
