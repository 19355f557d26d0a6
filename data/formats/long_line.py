# SPDX-License-Identifier: Apache-2.0
"""The text of one JSON line that is too long for memory, decoded in chunks.

The text field is decoded as it is read, and the rest of the line is kept: with an empty string in
place of the text, Python's JSON parser judges it at the end. So a line is valid here if and only if
it is valid there, with one exception: a line with the text field twice is refused, where the parser
takes the last one.
"""

import codecs
import io
import json
import re
from collections.abc import Callable, Iterator

from data.formats.records import (
    BLOCK_BYTES,
    UNREADABLE,
    Unusable,
    UnusableError,
    json_problem,
    text_of_object,
    unreadable,
)

MOST_OTHER_CHARS = 2**26
"""Characters of the other fields of a long line."""
LONGEST_ESCAPE = 6
"""Characters of an escaped code point; a surrogate pair has two."""

_MARK = re.compile(r'["{}\[\],:]')
_HIGH = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")


class LongLine:
    """A line whose first bytes have been read, and the stream with its other bytes."""

    def __init__(
        self, first: bytes, stream: io.BufferedIOBase, text_key: str, origin: object
    ) -> None:
        self._first, self._stream, self._text_key = first, stream, text_key
        self._origin = origin
        self._bytes = len(first)
        self._ended = first.endswith(b"\n")
        self._rest: list[str] = []
        self._rest_chars = 0
        self._texts = 0

    def chunks(self) -> Iterator[str]:
        """Yield the text; raise UnusableError for a broken line, perhaps after chunks."""
        yield from self._scanned(_Buffer(self._decoded()))
        found = self._judged("".join(self._rest))
        if found is not None:
            raise UnusableError(found.reason, found.problem)

    def finish(self) -> int:
        """Read what is left of the line; return its length in bytes."""
        for _ in self._blocks():
            pass
        return self._bytes

    def _blocks(self) -> Iterator[bytes]:
        while not self._ended:
            try:
                block = self._stream.readline(BLOCK_BYTES)
            except UNREADABLE as error:
                raise unreadable(self._origin, error) from error
            self._bytes += len(block)
            self._ended = not block or block.endswith(b"\n")
            yield block

    def _decoded(self) -> Iterator[str]:
        """Yield the line as characters, without a byte order mark."""
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        before = 0
        first = (self._first[at : at + BLOCK_BYTES] for at in range(0, self._bytes, BLOCK_BYTES))
        for blocks in (first, self._blocks(), (b"",)):
            for block in blocks:
                waiting = len(decoder.getstate()[0])
                try:
                    yield decoder.decode(block, final=blocks == (b"",))
                except UnicodeDecodeError as error:
                    at = before - waiting + error.start
                    problem = f"invalid UTF-8 at byte {at} of the line"
                    raise UnusableError("broken", problem) from error
                before += len(block)

    def _scanned(self, buffer: "_Buffer") -> Iterator[str]:
        """Yield the text field; keep everything else."""
        keys: list[str | None] = []  # of the objects around the mark; None for an array
        key_next = False
        while (mark := buffer.next_mark(self._keep)) is not None:
            if mark in "{[":
                key_next = mark == "{"
                keys.append("" if key_next else None)
            elif mark in "}]":
                del keys[-1:]
            elif mark == '"':
                if key_next and keys:
                    keys[-1] = self._key(buffer)
                elif None not in keys and ".".join(map(str, keys)) == self._text_key:
                    self._texts += 1
                    yield from (_unescaped(part) for part in buffer.string())
                else:
                    for part in buffer.string():
                        self._keep(part)
                self._keep('"')
            else:
                key_next = mark == "," and keys[-1:] != [None]

    def _key(self, buffer: "_Buffer") -> str:
        parts = []
        for part in buffer.string():
            self._keep(part)
            parts.append(part)
        return _unescaped("".join(parts))

    def _keep(self, part: str) -> None:
        self._rest.append(part)
        self._rest_chars += len(part)
        if self._rest_chars > MOST_OTHER_CHARS:
            raise UnusableError(
                "broken",
                f"the line has more than {MOST_OTHER_CHARS:,} characters outside the field "
                f"{self._text_key!r}",
            )

    def _judged(self, rest: str) -> Unusable | None:
        """Return the problem of the line, or None."""
        try:
            record = json.loads(rest)
        except json.JSONDecodeError as error:
            return Unusable("broken", f"invalid JSON ({json_problem(error)} outside the text)")
        except (ValueError, RecursionError) as error:
            return Unusable("broken", f"unusable JSON ({error})")
        if self._texts > 1:
            return Unusable("broken", f"the field {self._text_key!r} is there twice")
        found = text_of_object(record, self._text_key)
        return found if isinstance(found, Unusable) else None


class _Buffer:
    """What has been read of the line and not been used."""

    def __init__(self, chunks: Iterator[str]) -> None:
        self._chunks = chunks
        self._text = ""
        self._at = 0

    def next_mark(self, keep: Callable[[str], None]) -> str | None:
        """Return the next mark outside of strings, None at the end; what is passed is kept."""
        while True:
            found = _MARK.search(self._text, self._at)
            end = len(self._text) if found is None else found.end()
            keep(self._text[self._at : end])
            self._at = end
            if found is not None:
                return found[0]
            if not self._more():
                return None

    def string(self) -> Iterator[str]:
        """Yield the raw parts of the string that begins here, each with whole escapes."""
        while True:
            quote = self._closing_quote()
            end = _whole_escapes(self._text, self._at) if quote < 0 else quote
            if end > self._at:
                yield self._text[self._at : end]
            self._at = end
            if quote >= 0:
                self._at += 1
                return
            if not self._more():
                raise UnusableError("broken", "invalid JSON (a string does not end)")

    def _closing_quote(self) -> int:
        quote = self._text.find('"', self._at)
        while quote >= 0 and _backslashes(self._text, self._at, quote) % 2:
            quote = self._text.find('"', quote + 1)
        return quote

    def _more(self) -> bool:
        chunk = next(self._chunks, None)
        if chunk is None:
            return False
        self._text, self._at = self._text[self._at :] + chunk, 0
        return True


def _backslashes(text: str, start: int, end: int) -> int:
    """Count the backslashes directly before `end`."""
    at = end
    while at > start and text[at - 1] == "\\":
        at -= 1
    return end - at


def _whole_escapes(text: str, start: int) -> int:
    """Return where a part of a string may end: not in an escape, nor between two surrogates."""
    end = len(text)
    last = text.rfind("\\", max(start, end - LONGEST_ESCAPE), end)
    if last < 0 or _backslashes(text, start, last + 1) % 2 == 0:
        return end
    follows = text[last + 1 : last + 2]
    if follows and follows != "u":
        return end
    if end - last == LONGEST_ESCAPE:  # whole
        return last if _HIGH.fullmatch(text, last) else end
    before = last - LONGEST_ESCAPE
    if (
        before >= start
        and _HIGH.fullmatch(text, before, last)
        and _backslashes(text, start, before + 1) % 2
    ):
        return before
    return last


def _unescaped(part: str) -> str:
    try:
        return str(json.loads(f'"{part}"'))
    except json.JSONDecodeError as error:
        raise UnusableError(
            "broken", f"invalid JSON ({json_problem(error)} in a string)"
        ) from error
