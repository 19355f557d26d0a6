# SPDX-License-Identifier: Apache-2.0
"""Token files of a shard: the ids of its documents, and their lengths."""

import hashlib
import os
import secrets
from array import array
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from data.formats.records import SourceError
from data.tokenization.encoder import Encoder

COPIED = 2**20
LONGEST = 2**31 - 1
"""Tokens of a document; Megatron's index has 32 bits for them."""
LENGTHS_HELD = 2**16
LENGTH_TYPE = np.dtype("<i4")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFacts:
    """What was written for one split of a shard."""

    documents: int
    tokens: int
    bin_bytes: int
    bin_sha256: str
    lengths_sha256: str


class TooManyTokensError(SourceError):
    """A document that Megatron cannot index."""


class _Hashed:
    """A file that is written under a name of its own and hashed on the way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hidden = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        self.file: BinaryIO = self.hidden.open("wb")
        self.digest = hashlib.sha256()
        self.bytes = 0

    def write(self, content: bytes | memoryview) -> None:
        self.file.write(content)
        self.digest.update(content)
        self.bytes += len(content)

    def finish(self) -> str:
        self.file.close()
        self.hidden.replace(self.path)
        return self.digest.hexdigest()

    def discard(self) -> None:
        with suppress(OSError):
            self.file.close()
        self.hidden.unlink(missing_ok=True)


class TokenFiles:
    """Write the documents of one split of a shard."""

    def __init__(self, prefix: Path, encoder: Encoder) -> None:
        self._type = np.dtype(encoder.token_type)
        self._first = np.array(encoder.first_ids, dtype=self._type).tobytes()
        self._eod = np.array([encoder.eod_id], dtype=self._type).tobytes()
        self._ends = len(encoder.first_ids) + 1
        self._bin = _Hashed(prefix.with_name(prefix.name + ".bin"))
        self._lengths = _Hashed(prefix.with_name(prefix.name + ".lengths"))
        self._held = array("i")
        self.documents = self.tokens = 0

    def add(self, ids: NDArray[np.int32]) -> None:
        """Write a document."""
        self._bin.write(self._first)
        self._bin.write(ids.astype(self._type).tobytes())
        self._end_document(ids.size)

    def add_file(self, path: Path) -> None:
        """Write a document whose ids are in a file, in the type of the store."""
        self._bin.write(self._first)
        with path.open("rb", buffering=0) as file:
            while block := file.read(COPIED):
                self._bin.write(block)
        self._end_document(path.stat().st_size // self._type.itemsize)

    def _end_document(self, size: int) -> None:
        self._bin.write(self._eod)
        self._held.append(size + self._ends)
        self.documents += 1
        self.tokens += size + self._ends
        if len(self._held) >= LENGTHS_HELD:
            self._write_lengths()

    def _write_lengths(self) -> None:
        self._lengths.write(np.asarray(self._held, dtype=LENGTH_TYPE).tobytes())
        self._held = array("i")

    def finish(self) -> TokenFacts:
        """Give the files their names and return what they hold."""
        self._write_lengths()
        return TokenFacts(
            documents=self.documents,
            tokens=self.tokens,
            bin_bytes=self._bin.bytes,
            bin_sha256=self._bin.finish(),
            lengths_sha256=self._lengths.finish(),
        )

    def discard(self) -> None:
        """Remove what `finish` has not named."""
        self._bin.discard()
        self._lengths.discard()


def spool(parts: Iterable[NDArray[np.int32]], path: Path, encoder: Encoder) -> None:
    """Write the ids of one document to a file; raise for more than Megatron indexes."""
    tokens = len(encoder.first_ids)
    with path.open("wb") as file:
        for ids in parts:
            tokens += ids.size
            if tokens >= LONGEST:
                raise TooManyTokensError(f"more than {LONGEST - 1:,} tokens in one document")
            file.write(ids.astype(encoder.token_type).tobytes())
