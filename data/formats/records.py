# SPDX-License-Identifier: Apache-2.0
"""A record of a source: a text, a long text to be read in chunks, or a problem."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

LONG_BYTES = 8 * 2**20
"""A JSON line or a text file of more bytes is read in chunks and never as a whole."""
BLOCK_BYTES = 2**20
"""Bytes of a chunk."""

SkipReason = Literal["broken", "undecodable", "empty", "other_ending", "too_large"]

LEFT_OUT: dict[str, str] = {
    "broken": "broken",
    "undecodable": "not UTF-8 text",
    "empty": "empty",
    "other_ending": "with an ending that is not known",
    "too_large": "too large",
}
"""Each reason as words in a message."""


class SourceError(ValueError):
    """A source that cannot be read; the message says where and why in one sentence."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """The problem of a record, and whether it is an error or only counted."""

    reason: SkipReason
    problem: str
    texts: tuple[str, ...] | None = field(default=None, compare=False)
    """Other fields of the record that are strings, the longest first, if it lacks the text's."""


class UnusableError(Exception):
    """The problem of a long text, which may be found after some of its chunks."""

    def __init__(self, reason: SkipReason, problem: str) -> None:
        super().__init__(problem)
        self.found = Unusable(reason, problem)


class LongText(Protocol):
    """A text that is read in chunks, once, before the next record is asked for."""

    def chunks(self) -> Iterator[str]:
        """Yield the text; raise UnusableError when it turns out to be unusable."""


class Record(NamedTuple):
    """Where a record is, as `str(origin)`, and its text or its problem."""

    origin: object
    content: "str | LongText | Unusable"


@dataclass(frozen=True, slots=True)
class WholeText:
    """A long text that is in memory, as a value of Parquet is."""

    text: str

    def chunks(self) -> Iterator[str]:
        """Yield the text in chunks."""
        for start in range(0, len(self.text), BLOCK_BYTES):
            yield self.text[start : start + BLOCK_BYTES]


def json_problem(error: json.JSONDecodeError) -> str:
    """Return the words of an error of JSON, to be followed by its place."""
    return error.msg.removesuffix(" at")


def json_type(value: object) -> str:
    """Return what JSON calls a value, with its article."""
    names = {list: "an array", dict: "an object", str: "a string", bool: "a boolean"}
    if value is None:
        return "null"
    return names.get(type(value), "a number" if isinstance(value, int | float) else "another type")


def text_of_field(value: object, text_key: str) -> str | Unusable:
    """Return the text of a field or column, or its problem."""
    if isinstance(value, str):
        return value
    return Unusable("broken", f"the field {text_key!r} is not a string but {json_type(value)}")


def text_of_object(record: object, text_key: str) -> str | Unusable:
    """Return the text of a JSON value that should be an object, or its problem."""
    if not isinstance(record, dict):
        return Unusable("broken", f"not a JSON object but {json_type(record)}")
    if text_key not in record:
        keys = ", ".join(repr(key) for key in list(record)[:8]) or "no field at all"
        sizes = {str(key): len(value) for key, value in record.items() if isinstance(value, str)}
        texts = tuple(sorted(sizes, key=sizes.__getitem__, reverse=True))
        return Unusable("broken", f"no field {text_key!r}; the line has {keys}", texts)
    return text_of_field(record[text_key], text_key)
