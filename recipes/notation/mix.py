# SPDX-License-Identifier: Apache-2.0
"""The mix of a stage in a ladder file: the fields of `data.mixture.config.Mix`.

mix:
  shares:
    - {source: web, weight: 0.6}
    - {source: books, weight: 0.2, end_weight: 0.4, at_least: 32K}
  other_lengths:
    - {seq_length: 4K, steps: 0.08}
  documents_per_row: 64
"""

from collections.abc import Mapping
from typing import Any

from data.mixture.config import Mix
from recipes.spec.naming import length_from
from recipes.spec.schema import decode

LENGTHS = ("at_least", "below", "long_from", "seq_length", "overlap")


def read(stated: Mapping[str, Any]) -> Mix:
    """Return the mix of a mapping; lengths may be written as 32K.

    Raises ValueError with the place of what a mix cannot have, and for what has no effect in it.
    """
    if isinstance(stated, Mapping) and "long_share" in stated and stated.get("long_from") is None:
        raise ValueError(
            f"mix.long_share is {stated['long_share']} and no document is long without long_from; "
            "add it, such as long_from: 64K"
        )
    return decode(Mix, _with_lengths(stated), "mix")


def _with_lengths(stated: Any) -> Any:
    if isinstance(stated, list):
        return [_with_lengths(row) for row in stated]
    if not isinstance(stated, Mapping):
        return stated
    return {
        name: length_from(value)
        if name in LENGTHS and isinstance(value, str)
        else _with_lengths(value)
        for name, value in stated.items()
    }
