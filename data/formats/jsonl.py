# SPDX-License-Identifier: Apache-2.0
"""The lines of a JSONL file, or of a range of its bytes that begins and ends at line starts."""

import bz2
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.formats.records import (
    BLOCK_BYTES,
    LONG_BYTES,
    UNREADABLE,
    Record,
    Unusable,
    WholeText,
    json_problem,
    text_of_object,
    unreadable,
)

MOST_LINE_BYTES = 2**30
"""A longer line is not read: its text and its record would take several times as much memory."""
HEAD_BYTES = 2**16
"""Bytes from which the format of a file is known."""
_FIRST_BYTES = {
    "gzip": rb"\x1f\x8b",
    "bzip2": rb"BZh[1-9]",
    "xz": rb"\xfd7zXZ\0",
    "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",  # a frame, or one that is skipped
}


@dataclass(frozen=True, slots=True)
class LineOrigin:
    """A line, counted from a byte of its file; its number in the file is found for a message."""

    path: Path
    start: int
    number: int

    def __str__(self) -> str:
        return f"{self.path}:{self.number + _newlines(self.path, self.start)}"


def jsonl_file(
    path: Path, text_key: str, start: int = 0, stop: int | None = None
) -> Iterator[Record]:
    """Yield the records of the lines that begin in a range of bytes, which is at line starts.

    A compressed file has one range. Blank lines are no records.
    """
    number, at = 0, start
    try:
        with _open(path) as stream:
            if start:
                stream.seek(start)
            while stop is None or at < stop:
                line = stream.readline(MOST_LINE_BYTES + 1)
                if not line:
                    break
                number += 1
                size = len(line)
                if size > MOST_LINE_BYTES:
                    size += 0 if line.endswith(b"\n") else _rest_of_line(stream)
                    content: str | WholeText | Unusable = Unusable(
                        "broken",
                        f"the line has {size:,} bytes, more than the {MOST_LINE_BYTES:,} that are "
                        "read; write its text to a file of its own",
                    )
                else:
                    content = text_of_line(line, text_key)
                    if size > LONG_BYTES and isinstance(content, str):
                        content = WholeText(content)
                at += size
                is_blank, line = line.isspace(), b""  # a long one is not held with its text
                if not is_blank:
                    yield Record(LineOrigin(path, start, number), content)
    except UNREADABLE as error:
        after = f"{LineOrigin(path, start, number)}".rpartition(":")[2]
        raise unreadable(path, error, f" after line {after}") from error


def _rest_of_line(stream: io.BufferedIOBase) -> int:
    """Read on to the end of a line; return the bytes that were left of it."""
    size, block = 0, b" "
    while block and not block.endswith(b"\n"):
        block = stream.readline(BLOCK_BYTES)
        size += len(block)
    return size


def text_of_line(line: bytes, text_key: str) -> str | Unusable:
    """Return the text of a line, or its problem."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Unusable("broken", f"invalid UTF-8 at byte {error.start} of the line")
    except json.JSONDecodeError as error:
        return Unusable("broken", f"invalid JSON ({json_problem(error)} at column {error.colno})")
    except (ValueError, RecursionError) as error:
        return Unusable("broken", f"unusable JSON ({error})")
    return text_of_object(record, text_key)


def line_starts(path: Path, size: int, step: int) -> list[int]:
    """Return bytes at which lines begin, about `step` apart, the first 0; none for a last line."""
    starts = [0]
    with path.open("rb", buffering=0) as file:
        while (wanted := starts[-1] + step) < size:
            start = _next_line(file, wanted - 1)
            if start >= size:
                break
            starts.append(start)
    return starts


def _next_line(file: io.FileIO, at: int) -> int:
    """Return the byte after the first line break at or after a byte, or the end of the file."""
    file.seek(at)
    while block := file.read(BLOCK_BYTES):
        found = block.find(b"\n")
        if found >= 0:
            return at + found + 1
        at += len(block)
    return at


def _newlines(path: Path, stop: int) -> int:
    """Count the line breaks before a byte of a file that is not compressed."""
    if not stop:
        return 0
    count = 0
    with path.open("rb", buffering=0) as file:
        while stop and (block := file.read(min(stop, BLOCK_BYTES))):
            count += block.count(b"\n")
            stop -= len(block)
    return count


def compression(path: Path) -> str | None:
    """Return what a file is compressed with, by its first bytes; None: nothing."""
    with path.open("rb") as file:
        first = file.read(6)
    return next((name for name, magic in _FIRST_BYTES.items() if re.match(magic, first)), None)


def beginning(path: Path) -> bytes:
    """Return the first `HEAD_BYTES` of a file, uncompressed; SourceError for a damaged one."""
    try:
        with _open(path) as stream:
            return stream.read(HEAD_BYTES)
    except UNREADABLE as error:
        raise unreadable(path, error) from error


def _open(path: Path) -> io.BufferedIOBase:
    kind = compression(path)
    if kind == "zstd":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), kind))
    if kind is None:
        return path.open("rb")
    openers: dict[str, Callable[..., io.BufferedIOBase]] = {
        "gzip": gzip.GzipFile, "bzip2": bz2.BZ2File, "xz": lzma.LZMAFile,
    }  # fmt: skip
    return openers[kind](path)
