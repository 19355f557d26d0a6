# SPDX-License-Identifier: Apache-2.0
"""What JSON must hold under names with a unit."""

import re
from collections.abc import Iterator
from typing import Any

UNIT = re.compile(r"(?:.*_)?(?:tokens|bytes|seconds|gib|hours|length|steps|pairs)(?:_per_\w+)?")


def not_numbers(content: Any, name: str = "") -> Iterator[str]:
    """Yield what is under a name with a unit and is neither a number, null nor several of them."""
    if isinstance(content, dict):
        for key, value in content.items():
            of_unit = UNIT.fullmatch(name.rpartition(".")[2])
            yield from not_numbers(value, name if of_unit else f"{name}.{key}")
    elif isinstance(content, list):
        for value in content:
            yield from not_numbers(value, name)
    elif UNIT.fullmatch(name.rpartition(".")[2]) and (
        isinstance(content, bool) or not isinstance(content, int | float | None)
    ):
        yield f"{name[1:]} is {content!r}"
