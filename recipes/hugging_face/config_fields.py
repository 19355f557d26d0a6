# SPDX-License-Identifier: Apache-2.0
"""Read fields of config.json by type, with an error message for a wrong type."""

import math
from collections.abc import Mapping
from typing import Any

CONFIG = "config.json"
LONGEST = "max_position_embeddings"
"""Field with the context that a model is served to, by most methods that stretch it."""


def whole(
    content: Mapping[str, Any], key: str, default: int | None = None, most: int = 2**31
) -> int:
    """Return a whole number from 1 to `most`; raise ValueError for anything else."""
    value = _stated(content, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{CONFIG} has {key} {value!r}; it is a whole number, at least 1")
    if value > most:
        raise ValueError(f"{CONFIG} has {key} {value:,}; no model has more than {most:,}")
    return value


def number(content: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a finite number above 0; raise ValueError for anything else."""
    value = _stated(content, key, default)
    if not _is_number(value):
        raise ValueError(f"{CONFIG} has {key} {value!r}; it is a number above 0")
    return float(value)


def numbers(content: Mapping[str, Any], key: str) -> list[float]:
    """Return a list of finite numbers above 0; raise ValueError for anything else."""
    value = _stated(content, key, None)
    if not isinstance(value, list) or not all(_is_number(one) for one in value):
        raise ValueError(f"{CONFIG} has {key} {value!r}; it is a list of numbers above 0")
    return [float(one) for one in value]


def mapping(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a JSON object, empty if the field is null or left out."""
    value = content.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{CONFIG} has {key} {value!r}; it is an object, or null")
    return dict(value)


def words(content: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of strings, empty if the field is null or left out."""
    value = content.get(key) or []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{CONFIG} has {key} {value!r}; it is a list of words")
    return value


def _stated(content: Mapping[str, Any], key: str, default: Any) -> Any:
    value = content.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{CONFIG} has no {key}; download it again, or state it")
    return value


def _is_number(value: Any) -> bool:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and 0 < value < math.inf
