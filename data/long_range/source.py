# SPDX-License-Identifier: Apache-2.0
"""The documents of a synthetic source, each made from its number."""

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import ClassVar

from data.long_range.composition import Count, LongDocument, hidden_document
from data.long_range.filler import Filler
from data.long_range.hidden_lines import hidden_lines
from data.long_range.passages import asked_documents, copied_passage
from data.long_range.spec import LongRangeError, Spec
from data.readers import Document

FILLER_BYTES = 2**26
"""Text of the user's filler that is used: its first documents up to this many bytes."""

ReadTexts = Callable[[str], Iterable[str]]
"""Returns the documents of a source of text."""


def long_document(spec: Spec, number: int, count: Count, filler: Filler) -> LongDocument:
    """Return a document of a synthetic source.

    It depends on the arguments alone: on nothing that was made before.

    Args:
        count: tokens of a text by the tokenizer in use.
        filler: made from the source that `spec` names.
    """
    if not 0 <= number < spec.documents:
        raise IndexError(f"{spec} has no document {number}; it has {spec.documents}")
    draw = random.Random(f"{spec.seed} {spec.kind} {number}")
    length = _drawn_length(spec, draw)
    what = str(spec)
    if spec.kind == "copy":
        return copied_passage(spec, draw, filler, length=length, count=count, what=what)
    if spec.kind == "questions":
        return asked_documents(spec, draw, filler, length=length, count=count, what=what)
    hidden = hidden_lines(spec, draw)
    stream = filler.stream(draw)
    return hidden_document(
        draw, hidden, stream, depth=spec.depth, length=length, count=count, what=what
    )


def _drawn_length(spec: Spec, draw: random.Random) -> int:
    shortest, longest = spec.length
    doublings = math.log2(longest / shortest) * draw.random()
    return min(longest, round(shortest * 2**doublings))


def filler_of(spec: Spec, read: ReadTexts) -> Filler:
    """Return the filler that a spec names; `read` returns the texts of a source."""
    if not spec.filler:
        return Filler()
    texts, size = [], 0
    for text in read(spec.filler):
        texts.append(text)
        size += len(text.encode())
        if size >= FILLER_BYTES:
            break
    if not any(not text.isspace() for text in texts):
        raise LongRangeError(f"{spec}: the filler {spec.filler} has no text; choose another source")
    return Filler(texts)


def without_tokenizer(origin: str) -> LongRangeError:
    """Return the error of a synthetic source that is used without a tokenizer."""
    return LongRangeError(
        f"{origin} has its length in tokens, so that a tokenizer has to be known; give"
        " --tokenizer, for example the folder `tokenizer` of another store"
    )


class SyntheticSource:
    """The documents of a source that is written `synthetic:KIND[,name=value...]`, by number."""

    kind: ClassVar = "synthetic"

    def __init__(self, source: str, count: Count | None, read: ReadTexts) -> None:
        """Parse the source's name and read its filler.

        Args:
            count: tokens of a text; without it only `origin` and `len` can be used.
            read: returns the texts of another source, which the filler may be.
        """
        self.spec = Spec.parse(source)
        self._count = count
        self._filler = filler_of(self.spec, read)

    @property
    def origin(self) -> str:
        """Return the source's name with the default values written out."""
        return str(self.spec)

    @property
    def state(self) -> str:
        """Return a hash of the filler's texts; empty for made-up sentences."""
        if not self._filler.texts:
            return ""
        digest = hashlib.blake2b(digest_size=16)
        for text in self._filler.texts:
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
        return digest.hexdigest()

    def __len__(self) -> int:
        """Return the number of documents."""
        return self.spec.documents

    def document(self, number: int, skipped: Counter[str]) -> Document:
        """Return a document; `skipped` receives nothing, since none is left out."""
        del skipped
        if self._count is None:
            raise without_tokenizer(self.origin)
        made = long_document(self.spec, number, self._count, self._filler)
        return Document(made.text, f"{self.origin} document {number}")

    def size(self, number: int) -> int:
        """Return the estimated bytes of a document, to divide the work by."""
        del number
        return 4 * (self.spec.length[0] + self.spec.length[1]) // 2
