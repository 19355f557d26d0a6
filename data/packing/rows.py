# SPDX-License-Identifier: Apache-2.0
"""The index of packed rows: which piece of which document is where in each row.

    FOLDER/documents    uint32 or int64 [pieces]: number of the document in the index of its part
    FOLDER/lengths      uint32 [pieces]: tokens
    FOLDER/offsets      int64 [pieces]: first token in the document; absent if no document is cut
    FOLDER/starts       int64 [rows + 1]: first piece of each row
    FOLDER/work         float64 [rows]: sum of squares of the lengths of pieces and padding
    FOLDER/index.json   what it is made of; written last

Documents are packed in windows of about a million, so that neither building nor reading holds
anything per document in memory; all arrays are memory-mapped. For whole documents the index takes 8
bytes a document and 16 a row.
"""

import errno
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.files.whole import folder_beside
from data.files.writable import reason
from data.packing.best_fit import best_fit
from data.packing.permutation import hashed

FORMAT = 1
INDEX = "index.json"
WINDOW = 2**20
"""Documents that are packed together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is packed, and how; the same request has the same rows."""

    lengths_sha256: str
    """Of the Megatron index that the documents are in."""
    at_least: int
    below: int | None
    row_length: int
    packing: Literal["best_fit", "cut"]
    documents_per_row: int | None
    overlap: int
    seed: int
    between: tuple[float, float] = (0.0, 1.0)
    """Range of the documents' hashes, from 0 to 1, that is packed; all of them by default."""

    @property
    def key(self) -> str:
        """A short name of the request."""
        content = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


class Pieces(NamedTuple):
    """The pieces of one row, or of a window in order of rows."""

    documents: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]


class RowError(ValueError):
    """Rows that cannot be read or written; the message says what to do."""


class NotPackedError(RowError):
    """Rows that are not packed, where nothing may be."""


class Rows:
    """Packed rows of one group, read from disk as they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Open a finished index; raises RowError where it is damaged."""
        try:
            facts: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            given = facts["request"]
            self.request = Request(**{**given, "between": tuple(given["between"])})
            self.rows, self.pieces = int(facts["rows"]), int(facts["pieces"])
            self.tokens, self.most_pieces = int(facts["tokens"]), int(facts["most_pieces"])
            self.cuts = int(facts["cuts"])
            types: dict[str, str] = facts["types"]
            self._arrays = {name: _mapped(folder / name, types[name]) for name in types}
            sizes = {name: array.size for name, array in self._arrays.items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RowError(
                f"the packed rows in {folder} cannot be read ({error}); remove the folder, and "
                "they are packed again"
            ) from error
        wanted = dict.fromkeys(("documents", "lengths", "offsets"), self.pieces)
        wanted |= {"starts": self.rows + 1, "work": self.rows}
        if any(sizes[name] != wanted[name] for name in sizes):
            raise RowError(
                f"the packed rows in {folder} are cut short; remove the folder, and they are "
                "packed again"
            )

    @property
    def filled(self) -> float:
        """Share of the rows that is tokens, not padding."""
        return self.tokens / (self.rows * self.request.row_length)

    @property
    def work(self) -> NDArray[np.float64]:
        """Sum of squared lengths [rows], padding included."""
        return self._arrays["work"]

    def tokens_of(self, numbers: NDArray[np.int64]) -> int:
        """Return the tokens of rows together, without their padding."""
        starts = self._arrays["starts"]
        first = starts[numbers].astype(np.int64)
        sizes = starts[numbers + 1].astype(np.int64) - first
        before = np.cumsum(sizes) - sizes
        pieces = np.arange(int(sizes.sum())) + np.repeat(first - before, sizes)
        return int(self._arrays["lengths"][pieces].sum(dtype=np.int64))

    def row(self, number: int) -> Pieces:
        """Return the pieces of a row, in order."""
        first, end = self._arrays["starts"][number : number + 2].tolist()
        documents, lengths = (
            self._arrays[name][first:end].astype(np.int64) for name in ("documents", "lengths")
        )
        offsets = self._arrays.get("offsets")
        none = np.zeros(end - first, np.int64)
        return Pieces(documents, none if offsets is None else offsets[first:end], lengths)


def packed(
    folder: Path, request: Request, document_lengths: NDArray[np.integer[Any]] | None
) -> Rows:
    """Return the rows of a request, from below a folder, where they are packed if they are not yet.

    Args:
        document_lengths: tokens [n] of all documents of the part, perhaps memory-mapped; None to
            pack nothing.

    Raises ValueError if no document has a length of the request, RowError where they cannot be
    written, and NotPackedError without `document_lengths` if the rows are not packed.
    """
    place = folder / f"rows-{request.key}"
    if not (place / INDEX).is_file():
        if document_lengths is None:
            raise NotPackedError(f"there are no packed rows at {place}")
        try:
            with folder_beside(place) as part:
                _write(part, request, document_lengths)
                part.rename(place)
        except OSError as error:
            if not (place / INDEX).is_file():  # else another process has packed them meanwhile
                where = "make room there, or copy the store to another file system"
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    where = "pack them once as a user who may write there, or copy the store"
                raise RowError(
                    f"the rows of a mix cannot be packed in {folder} ({reason(error)}); {where}"
                ) from error
    return Rows(place)


def _mapped(path: Path, dtype: str) -> NDArray[Any]:
    """Map an array of numbers; NumPy would take the bytes of a file for pointers to objects."""
    if np.dtype(dtype).kind not in "iuf":
        raise ValueError(f"{path.name} is of type {dtype} instead of numbers")
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _write(folder: Path, request: Request, document_lengths: NDArray[np.integer[Any]]) -> None:
    count = document_lengths.size
    number = np.uint32 if count < 2**32 else np.int64
    types = {"documents": np.dtype(number).str, "lengths": "<u4", "starts": "<i8", "work": "<f8"}
    chosen = _chosen(request, document_lengths)
    if request.packing == "cut" or any(int(part.max()) > request.row_length for _, part in chosen):
        types["offsets"] = "<i8"
    rows = pieces = tokens = most = cuts = 0
    with _files(folder, types) as files:
        files["starts"].write(np.zeros(1, "<i8").tobytes())
        for window, counts in _windows(request, document_lengths):
            ends = np.cumsum(counts)
            sizes = window.lengths.astype(np.float64)
            padding = request.row_length - np.add.reduceat(sizes, ends - counts)
            squares = np.add.reduceat(sizes**2, ends - counts) + padding**2
            columns: dict[str, NDArray[Any]] = {
                "documents": window.documents, "lengths": window.lengths, "work": squares,
                "offsets": window.offsets, "starts": ends + pieces,
            }  # fmt: skip
            for name, file in files.items():
                file.write(columns[name].astype(types[name]).tobytes())
            rows, pieces = rows + counts.size, pieces + int(ends[-1])
            tokens += int(window.lengths.sum())
            cuts += int((window.offsets > 0).sum())
            most = max(most, int(counts.max()))
    if not rows:
        raise ValueError(
            f"no document has at least {request.at_least:,} tokens"
            + (f" and fewer than {request.below:,}" if request.below is not None else "")
        )
    facts = {
        "request": asdict(request), "rows": rows, "pieces": pieces, "tokens": tokens,
        "most_pieces": most, "cuts": cuts, "types": types,
    }  # fmt: skip
    (folder / INDEX).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _files(folder: Path, names: Iterable[str]) -> Iterator[dict[str, BinaryIO]]:
    """Open the arrays of an index for writing."""
    with ExitStack() as stack:
        yield {name: stack.enter_context((folder / name).open("wb")) for name in names}


def _chosen(
    request: Request, lengths: NDArray[np.integer[Any]]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield windows of the request's documents: their numbers and their lengths.

    A window has `WINDOW` documents of the request, however few of the store's these are.
    """
    low, high = request.between
    waiting: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    held = 0
    for first in range(0, lengths.size, WINDOW):
        part = np.asarray(lengths[first : first + WINDOW], np.int64)
        inside = part >= request.at_least
        if request.below is not None:
            inside &= part < request.below
        numbers = np.flatnonzero(inside) + first
        if (low, high) != (0.0, 1.0):
            hashes = hashed(numbers, request.seed)
            numbers = numbers[(hashes >= low) & (hashes < high)]
        if numbers.size:
            waiting.append((numbers, part[numbers - first]))
            held += numbers.size
        while held >= WINDOW:
            joined = _joined_windows(waiting)
            yield joined[0][:WINDOW], joined[1][:WINDOW]
            waiting = [(joined[0][WINDOW:], joined[1][WINDOW:])]
            held -= WINDOW
    if held:
        yield _joined_windows(waiting)


def _joined_windows(
    parts: list[tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    numbers, lengths = zip(*parts, strict=True)
    return np.concatenate(numbers), np.concatenate(lengths)


def _windows(
    request: Request, lengths: NDArray[np.integer[Any]]
) -> Iterator[tuple[Pieces, NDArray[np.int64]]]:
    """Yield the pieces of each window in order of its rows, and the pieces of each row."""
    if request.packing == "cut":
        yield from _cut_windows(request, lengths)
        return
    for window, (numbers, whole) in enumerate(_chosen(request, lengths)):
        pieces = _pieces(numbers, whole, request.row_length, request.overlap)
        rows = best_fit(pieces.lengths, request.row_length, most=request.documents_per_row)
        # Within a row in random order: the longest would always come first.
        chance = np.random.default_rng((request.seed, window)).random(rows.size)
        order = np.lexsort((chance, rows))
        yield Pieces(*(column[order] for column in pieces)), np.bincount(rows)


def _pieces(
    documents: NDArray[np.int64], lengths: NDArray[np.int64], row_length: int, overlap: int
) -> Pieces:
    """Cut documents longer than a row into rows, each `overlap` tokens back, and a rest."""
    stride = row_length - overlap
    more = np.maximum(0, -(-(lengths - row_length) // stride))
    at = np.repeat(np.arange(lengths.size), more + 1)
    first = np.cumsum(more + 1) - (more + 1)
    offsets = (np.arange(at.size) - first[at]) * stride
    return Pieces(documents[at], offsets, np.minimum(row_length, lengths[at] - offsets))


def _cut_windows(
    request: Request, lengths: NDArray[np.integer[Any]]
) -> Iterator[tuple[Pieces, NDArray[np.int64]]]:
    """Join the documents of each window in random order, and cut that at every row's end.

    What is left of a window begins the next one; what is left at the end is a row with padding.
    """
    S, rest = request.row_length, Pieces(*(np.empty(0, np.int64) for _ in range(3)))
    for window, (numbers, whole) in enumerate(_chosen(request, lengths)):
        order = np.random.default_rng((request.seed, window)).permutation(numbers.size)
        joined = Pieces(
            np.concatenate([rest.documents, numbers[order]]),
            np.concatenate([rest.offsets, np.zeros(order.size, np.int64)]),
            np.concatenate([rest.lengths, whole[order]]),
        )
        ends = np.cumsum(joined.lengths)
        bounds = np.union1d(ends, np.arange(S, int(ends[-1]) + 1, S))
        begins = np.concatenate([[0], bounds[:-1]])
        at = np.searchsorted(ends, begins, side="right")
        cut = Pieces(
            joined.documents[at],
            joined.offsets[at] + begins - (ends - joined.lengths)[at],
            bounds - begins,
        )
        row, full = begins // S, int(ends[-1]) // S
        kept = row < full
        rest = Pieces(*(column[~kept] for column in cut))
        if full:
            yield Pieces(*(column[kept] for column in cut)), np.bincount(row[kept])
    if rest.documents.size:
        yield rest, np.array([rest.documents.size])
