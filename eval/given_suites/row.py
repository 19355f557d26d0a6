# SPDX-License-Identifier: Apache-2.0
"""A row of a published file, whatever its suite."""

from dataclasses import dataclass

Message = dict[str, str]
"""A chat message: `role` and `content`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of a file."""

    task: str
    messages: list[Message]
    outputs: tuple[str, ...]
    """What the suite's metric compares a response with."""
    expected: str
    """A response that scores 1."""
