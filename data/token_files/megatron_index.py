# SPDX-License-Identifier: Apache-2.0
"""Megatron's index file: read it, check it against its token file, write one of its own.

    magic, version, dtype code    9 + 8 + 1 bytes
    sequences, boundaries         8 + 8 bytes
    lengths                       int32, tokens of each sequence
    pointers                      int64, the byte of the token file at which each sequence starts
    boundaries                    int64, the first sequence of each document, then their number
    modes                         int8, in multimodal files only

A pointer may be any byte, so that an index can list the documents of a token file in any order and
leave some out. Arrays are mapped into memory, not read. Neither torch nor Megatron is imported.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from data.token_files.tokens import TokenArray, TokenType, mapped

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
INDEX_BYTES = 4 + 8 + 8
"""Bytes of an index for each document: length, pointer and document."""
DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
"""Megatron's codes of the types of tokens."""
AGAIN = "restore it from a copy, or write the data set again"
LONGEST = 2**31 - 1
"""Tokens of a document that the index can state."""
DOCUMENTS_AT_ONCE = 2**20


class IndexFileError(ValueError):
    """An index that cannot be used; the message names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """Lengths and places of sequences or documents in a token file."""

    path: Path
    dtype: TokenType
    lengths: NDArray[np.int32]
    """Tokens of each."""
    pointers: NDArray[np.int64]
    """The byte of the token file at which each starts."""

    @property
    def bin_path(self) -> Path:
        """The token file of this index, or the folder of its token files."""
        return self.path.with_name(self.path.name.removesuffix(".idx") + ".bin")

    @property
    def tokens(self) -> int:
        """Tokens of all."""
        return int(self.lengths.sum(dtype=np.int64))

    def mapped(self) -> TokenArray:
        """Return its tokens as an array that is mapped into memory."""
        return mapped(self.bin_path, self.dtype)


def read_index(path: Path, *, fills_bin: bool = False) -> MegatronIndex:
    """Return the documents of an index; sequences of one document are joined.

    With `fills_bin` the token file is required to have these documents and nothing else.

    Raises:
        IndexFileError: for a file that is not an index, is truncated or has data after its end,
            and for a document whose sequences are not next to each other.
    """
    dtype, sequences, boundaries_count = _header(path)
    size = path.stat().st_size
    expected = _HEADER.size + 12 * sequences + 8 * boundaries_count
    if size not in (expected, expected + sequences):
        raise IndexFileError(
            f"{path} has {size:,} bytes and its header describes {expected:,}: {sequences:,} "
            f"sequences and {boundaries_count:,} boundaries; it is truncated or damaged; {AGAIN}"
        )
    if not sequences:
        raise IndexFileError(f"{path} lists no sequences; name a data set that has documents")
    at = _HEADER.size
    lengths = np.memmap(path, dtype="<i4", mode="r", offset=at, shape=(sequences,))
    at += lengths.nbytes
    pointers = np.memmap(path, dtype="<i8", mode="r", offset=at, shape=(sequences,))
    at += pointers.nbytes
    boundaries = np.memmap(path, dtype="<i8", mode="r", offset=at, shape=(boundaries_count,))
    index = MegatronIndex(path, dtype, lengths, pointers)
    if fills_bin:
        _require_fills(index)
    if _is_a_range(boundaries, sequences):
        return index
    return _joined(index, np.array(boundaries))


def write_index(
    path: Path,
    dtype: TokenType,
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
) -> None:
    """Write an index with one sequence for each document."""
    with IndexWriter(path, dtype, len(lengths)) as index:
        index.add(lengths, pointers)


class IndexWriter:
    """Write an index of documents that arrive in order, without holding them.

    The three arrays are filled side by side by writing at places of the file, not through memory: a
    full disk is an OSError then, where a mapped page ends the process.
    """

    def __init__(self, path: Path, dtype: TokenType, documents: int) -> None:
        """Begin an index of a number of documents."""
        code = next(code for code, name in DTYPES.items() if np.dtype(name) == dtype)
        self._documents, self._done = documents, 0
        self._file: BinaryIO = path.open("wb")
        self._file.write(_HEADER.pack(MAGIC, VERSION, code, documents, documents + 1))

    def __enter__(self) -> "IndexWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()

    def add(self, lengths: NDArray[np.int32], pointers: NDArray[np.int64]) -> None:
        """Write the next documents."""
        for start in range(0, len(lengths), DOCUMENTS_AT_ONCE):
            some = slice(start, start + DOCUMENTS_AT_ONCE)
            stop = self._done + len(lengths[some])
            self._write(0, lengths[some], "<i4")
            self._write(4 * self._documents, pointers[some], "<i8")
            self._write(12 * self._documents, np.arange(self._done, stop), "<i8")
            self._done = stop

    def _write(self, array: int, values: NDArray[np.integer[Any]], kind: str) -> None:
        """Write values of the array that begins `array` bytes after the header."""
        self._file.seek(_HEADER.size + array + self._done * np.dtype(kind).itemsize)
        self._file.write(np.ascontiguousarray(values, kind).data)

    def _finish(self) -> None:
        if self._done != self._documents:
            raise ValueError(f"{self._done:,} documents of {self._documents:,} were written")
        self._write(12 * self._documents, np.array([self._documents]), "<i8")


def _header(path: Path) -> tuple[TokenType, int, int]:
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    if not header.startswith(MAGIC):
        raise IndexFileError(
            f"{path} is not an index of Megatron: expected {MAGIC!r} at its start, not "
            f"{header[:9]!r}"
        )
    if len(header) < _HEADER.size:
        raise IndexFileError(
            f"{path} has {len(header)} bytes, less than a header; it is truncated; {AGAIN}"
        )
    _, version, code, sequences, boundaries = _HEADER.unpack(header)
    if version != VERSION:
        raise IndexFileError(f"{path} has version {version}; expected version {VERSION}")
    if code not in DTYPES or np.dtype(DTYPES[code]).kind == "f":
        kind = f"{np.dtype(DTYPES[code]).name} numbers" if code in DTYPES else f"the code {code}"
        raise IndexFileError(
            f"{path} has tokens of an unusable type, {kind}; token ids are whole numbers, as "
            "Megatron writes them in uint16 or int32"
        )
    return np.dtype(DTYPES[code]).newbyteorder("<"), int(sequences), int(boundaries)


def _require_fills(index: MegatronIndex) -> None:
    """Raise IndexFileError unless the documents fill the token file exactly, none outside it."""
    path = index.bin_path
    size, width = path.stat().st_size, index.dtype.itemsize
    if size != index.tokens * width:
        raise IndexFileError(
            f"{path} has {size:,} bytes and {index.path.name} describes {index.tokens * width:,}: "
            f"{index.tokens:,} tokens of {width} bytes; one of them is truncated, or they are not "
            f"of one data set; {AGAIN}"
        )
    require_within(index, size)


def require_within(index: MegatronIndex, size: int) -> None:
    """Raise IndexFileError unless each sequence lies within its token files of `size` bytes."""
    width = index.dtype.itemsize
    for start in range(0, len(index.lengths), DOCUMENTS_AT_ONCE):
        some = slice(start, start + DOCUMENTS_AT_ONCE)
        first = index.pointers[some].astype(np.int64)
        length = index.lengths[some].astype(np.int64)
        wrong = (length < 0) | (first < 0) | (first % width != 0) | (first + length * width > size)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise IndexFileError(
                f"{index.path} is damaged: sequence {start + at:,} has {length[at]:,} tokens from "
                f"byte {first[at]:,} on, in a token file of {size:,} bytes; {AGAIN}"
            )


def _is_a_range(boundaries: NDArray[np.int64], sequences: int) -> bool:
    """Return whether every document has one sequence; raise nothing."""
    if len(boundaries) != sequences + 1:
        return False
    return all(
        np.array_equal(
            boundaries[start : start + DOCUMENTS_AT_ONCE],
            np.arange(start, min(start + DOCUMENTS_AT_ONCE, sequences + 1)),
        )
        for start in range(0, sequences + 1, DOCUMENTS_AT_ONCE)
    )


def _joined(index: MegatronIndex, boundaries: NDArray[np.int64]) -> MegatronIndex:
    """Return one entry for each document of several sequences."""
    sequences = len(index.lengths)
    if (
        len(boundaries) < 2
        or boundaries[0] != 0
        or boundaries[-1] != sequences
        or (np.diff(boundaries) < 0).any()
    ):
        raise IndexFileError(
            f"{index.path} is damaged: the boundaries of its documents do not rise from 0 to "
            f"{sequences:,}, its number of sequences; {AGAIN}"
        )
    lengths = index.lengths.astype(np.int64)
    pointers = index.pointers.astype(np.int64)
    follows = pointers[1:] == pointers[:-1] + lengths[:-1] * index.dtype.itemsize
    starts_document = np.zeros(sequences + 1, dtype=bool)
    starts_document[boundaries] = True
    apart = ~follows & ~starts_document[1:sequences]
    if apart.any():
        sequence = int(np.argmax(apart)) + 1
        document = int(np.searchsorted(boundaries, sequence, side="right")) - 1
        raise IndexFileError(
            f"{index.path}: the sequences of document {document:,} are not next to each other in "
            f"{index.bin_path.name} (sequence {sequence:,} does not follow the one before it), so "
            "they cannot be joined; write the data set again with one sequence for each document"
        )
    ends = np.concatenate([[0], np.cumsum(lengths)])
    joined = np.diff(ends[boundaries])
    if (joined > LONGEST).any():
        document = int(np.argmax(joined > LONGEST))
        raise IndexFileError(
            f"{index.path}: document {document:,} has {joined[document]:,} tokens; an index holds "
            f"{LONGEST:,} at most"
        )
    first = np.append(pointers, 0)[boundaries[:-1]]  # a last document without sequences is empty
    return MegatronIndex(index.path, index.dtype, joined.astype(np.int32), first)
