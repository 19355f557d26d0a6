# SPDX-License-Identifier: Apache-2.0
"""A record of a source: a text, a long text to be read in chunks, or a problem."""

import json
import lzma
import shlex
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

LONG_BYTES = 8 * 2**20
"""The text of a larger JSON line is tokenized in chunks; a larger text file is read in chunks."""
BLOCK_BYTES = 2**20
"""Bytes of a chunk."""

UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""Errors of a damaged file."""
LEAST_TEXT = 100
"""Characters of a string that may be a document; keys, addresses, titles and codes have fewer."""
DEEPEST = 4
"""Objects in objects, in which strings are looked for to name them."""
SHOWN = 8
"""Fields that a message names."""

SkipReason = Literal[
    "broken", "undecodable", "empty", "other_ending", "not_read", "left_out", "too_large"
]

LEFT_OUT: dict[str, str] = {
    "broken": "broken",
    "undecodable": "not UTF-8 text",
    "empty": "empty",
    "other_ending": "with an ending that is not known",
    "not_read": "of a format that is not read",
    "left_out": "left out by --skip",
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
    fields: dict[str, int] | None = field(default=None, compare=False)
    """If the record lacks the text: its fields, each with its characters if it looks like text,
    else 0. One in an object is OBJECT.FIELD, and ARRAY[] stands for the values of an array."""


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
    """A long text that is in memory, as one of Parquet or of a JSON line is."""

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
    """Return the text of a field or column, or its problem; bytes are UTF-8."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            return Unusable("broken", f"invalid UTF-8 at byte {error.start} of {text_key!r}")
    return Unusable("broken", f"the field {text_key!r} is not a string but {json_type(value)}")


def text_of_object(record: object, text_key: str) -> str | Unusable:
    """Return the text of a JSON value that should be an object, or its problem.

    A `text_key` that is not a field of it, as A.B, is the field B of the object that is A.
    """
    if not isinstance(record, dict):
        return Unusable("broken", f"not a JSON object but {json_type(record)}")
    if text_key in record:
        found = text_of_field(record[text_key], text_key)
        if isinstance(found, str):
            return found
        problem = found.problem
    else:
        outer, dot, inner = text_key.partition(".")
        if dot and isinstance(record.get(outer), dict):
            found = text_of_object(record[outer], inner)
            if isinstance(found, str):
                return found
        problem = f"no field {text_key!r}"
    fields = dict(_fields(record))
    keys = ", ".join(map(repr, list(fields)[:SHOWN])) or "no field at all"
    return Unusable("broken", f"{problem}; the line has {keys}", fields)


def _fields(value: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield the path of each value that is not an object, and its characters if it is text."""
    if isinstance(value, dict) and depth < DEEPEST:
        for key, inner in value.items():
            yield from _fields(inner, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, list):
        sizes: dict[str, int] = {f"{path}[]": 0}
        for inner in value:
            for name, size in _fields(inner, f"{path}[]", depth + 1) if depth < DEEPEST else ():
                sizes[name] = sizes.get(name, 0) + size
        if len(sizes) > 1:
            del sizes[f"{path}[]"]
        yield from sizes.items()
    else:
        yield path, len(value) if isinstance(value, str) and _looks_like_text(value) else 0


def _looks_like_text(value: str) -> bool:
    """Return whether a string is long, and has blanks or a script that is written without."""
    some = value[: 100 * LEAST_TEXT]
    words = len(some.split())
    return len(value) >= LEAST_TEXT and (words * 40 >= len(some) or not some.isascii())


def text_advice(records: Sequence[dict[str, int]]) -> str:
    """Return what to do about records without the text, given the `fields` of each."""
    names = dict.fromkeys(name for record in records for name in record)
    total = {
        name: sum(record.get(name, 0) for record in records)
        for name in names
        if 2 * sum(record.get(name, 0) > 0 for record in records) > len(records)
    }
    best = max(total, key=total.__getitem__, default=None)
    if best is None:
        return "no field of it looks like text; if one is, name it with --text-key"
    if "[]" in best:
        program = f'{{text: ([.{best}] | join("\n"))}}'
        return f"its text is in an array, {best}; write it as one string: jq -c {program!r}"
    return f"name the field of the text, such as --text-key {shlex.quote(best)}"


def unreadable(place: object, error: Exception, after: str = "") -> SourceError:
    """Return the error of a damaged file, or of one that zstd refuses to read."""
    if "too much memory" in str(error):
        name = shlex.quote(str(place))
        return SourceError(
            f"{place}: its zstd window is larger than 128 MiB, the most that is read; write it "
            f"again: zstd -d --long=31 -c {name} | zstd -o NEW.zst"
        )
    return SourceError(
        f"{place}: damaged or unreadable{after} ({error}); write or download it again"
    )
