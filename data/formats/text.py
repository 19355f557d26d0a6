# SPDX-License-Identifier: Apache-2.0
"""A text file: one document."""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.formats.records import BLOCK_BYTES, LONG_BYTES, Record, Unusable, UnusableError

NOT_TEXT = "the file is not UTF-8 text"


def text_file(path: Path) -> Iterator[Record]:
    """Yield the one document of a text file."""
    try:
        if path.stat().st_size > LONG_BYTES:
            yield Record(path, LongFile(path))
            return
        content = path.read_bytes()
    except OSError as error:
        yield Record(path, Unusable("broken", f"cannot be read ({error.strerror})"))
        return
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    yield Record(path, Unusable("broken", NOT_TEXT) if "\0" in text else text)


@dataclass(frozen=True, slots=True)
class LongFile:
    """A text file that is read in chunks."""

    path: Path

    def chunks(self) -> Iterator[str]:
        """Yield its text; raise UnusableError for bytes that are not text."""
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        try:
            with self.path.open("rb", buffering=0) as file:
                while block := file.read(BLOCK_BYTES):
                    yield _text(decoder, block)
            yield _text(decoder, b"", final=True)
        except OSError as error:
            raise UnusableError("broken", f"cannot be read ({error.strerror})") from error


def _text(decoder: codecs.IncrementalDecoder, block: bytes, final: bool = False) -> str:
    try:
        text = decoder.decode(block, final)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UnusableError("broken", NOT_TEXT)
    return text
