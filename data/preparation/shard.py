# SPDX-License-Identifier: Apache-2.0
"""The records of a shard, and the SHA-256 of the files that begin in it."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from data.files.sha256 import sha256_of
from data.formats.hub import hub_rows
from data.formats.jsonl import jsonl_file
from data.formats.parquet import parquet_file
from data.formats.records import Record, SourceError
from data.formats.text import text_file
from data.long_range.documents import SyntheticSource
from data.preparation.plan import Piece, Shard
from data.readers import HUB_PREFIX
from data.repositories.source import joined, measure
from data.sources import synthetic

Count = Callable[[str], int]
"""Tokens of a text by the tokenizer in use."""

CHANGED = "has changed since the plan was made"
AGAIN = "start `longhaul prepare` again once it stays as it is"

MOST_HASHED_BYTES = 2**36
"""A larger file is not hashed, and its source has none then: one process would read it for minutes.
"""


def shard_records(
    shard: Shard, text_key: str, count: Count | None, skipped: Counter[str]
) -> Iterator[Record]:
    """Yield the records of a shard in order; raise SourceError for what has changed.

    Args:
        count: for synthetic sources, which need a tokenizer.
        skipped: receives what is left out of documents, by reason.
    """
    for piece in shard.pieces:
        _require_unchanged(piece)
        yield from _records(piece, text_key, count, skipped)
        _require_unchanged(piece)


def file_sums(shard: Shard) -> dict[str, str | None]:
    """Return the SHA-256 of each file whose first bytes are in the shard; None: not hashed.

    Each file is read once more, and as a whole, though other tasks may read its other parts.
    """
    first = [piece for piece in shard.pieces if piece.is_of_file and not piece.start]
    hashed = [piece.path for piece in first if piece.size <= MOST_HASHED_BYTES]
    sums: dict[str, str | None] = {piece.path: None for piece in first}
    return sums | dict(zip(hashed, sha256_of([Path(path) for path in hashed]), strict=True))


def _records(
    piece: Piece, text_key: str, count: Count | None, skipped: Counter[str]
) -> Iterator[Record]:
    path = Path(piece.path)
    if piece.kind == "jsonl":
        return jsonl_file(path, text_key, piece.start, piece.stop)
    if piece.kind == "parquet":
        return parquet_file(path, text_key, piece.start, piece.stop)
    if piece.kind == "text":
        return text_file(path)
    if piece.kind == "hub":
        return hub_rows(piece.path, HUB_PREFIX, text_key)
    if piece.kind == "repository":
        return iter([Record(path, joined(path, skipped))])
    source = _synthetic(piece.path, count, piece.state)
    made = (source.document(n, skipped) for n in range(piece.start, piece.stop or len(source)))
    return (Record(document.origin, document.text) for document in made)


@lru_cache(maxsize=4)
def _synthetic(source: str, count: Count | None, state: str) -> SyntheticSource:
    """Return a source with the filler of the plan, read once for all shards of a process."""
    found = synthetic(source, count)
    if found.state != state:
        raise SourceError(f"the filler {found.spec.filler} {CHANGED}; {AGAIN}")
    return found


def _require_unchanged(piece: Piece) -> None:
    if piece.kind == "repository" and measure(Path(piece.path)).state != piece.state:
        raise SourceError(f"the repository {piece.path} {CHANGED}; {AGAIN}")
    if not piece.is_of_file:
        return
    try:
        facts = Path(piece.path).stat()
    except OSError as error:
        raise SourceError(f"{piece.path} cannot be read ({error.strerror})") from error
    if (facts.st_size, facts.st_mtime_ns) != (piece.size, piece.mtime_ns):
        raise SourceError(
            f"{piece.path} {CHANGED}: {facts.st_size:,} bytes of {_time(facts.st_mtime_ns)}, "
            f"not {piece.size:,} bytes of {_time(piece.mtime_ns)}; {AGAIN}"
        )


def _time(nanoseconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(nanoseconds // 10**9))
