# SPDX-License-Identifier: Apache-2.0
"""Format descriptions such as `Recompute` as text, showing only non-default fields."""

from dataclasses import fields
from typing import Any


def non_default_text(noun: Any) -> str:
    """Return the fields of a description that differ from their defaults, or `none`."""
    plain = type(noun)()
    changed = {}
    for field in fields(noun):
        chosen = getattr(noun, field.name)
        if chosen != getattr(plain, field.name):
            changed[field.name] = chosen
    kind = changed.pop("kind", getattr(noun, "kind", None))
    words = [] if kind is None else [str(kind)]
    for name, chosen in changed.items():
        value = f"{chosen:.3g}" if isinstance(chosen, float) else str(chosen)
        words.append(name if chosen is True else f"{name}={value}")
    return " ".join(words) or "none"
