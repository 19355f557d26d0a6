# SPDX-License-Identifier: Apache-2.0
"""The plan of a store: its sources, cut into shards that do not depend on who will read them.

An input file is recorded with its size and time of change, a repository with a hash of those of
its files, and synthetic documents with a hash of their filler. A task refuses one that has changed
since. A file's SHA-256 enters the manifest; the task of the file's first part reads the file once
more for it, so that no file is hashed before the work begins.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from data.formats.by_content import Format, content_format, format_of
from data.formats.jsonl import compression, line_starts
from data.formats.parquet import row_groups
from data.formats.records import SourceError, Unusable
from data.progress import say
from data.readers import HUB_PREFIX, library_files, not_read, source_files, source_name
from data.repositories.source import RepositoriesSource, measure
from data.sources import Kind, absolute, kind_of, synthetic

SHARD_BYTES = 2**24
"""Least bytes of a shard of a large source; some seconds of work."""
MADE_BYTES = 2**21
"""The same for synthetic text, which takes longer to make than to tokenize."""
MOST_SHARDS = 4096
"""About so many shards a source has at most, of more bytes each."""

PieceKind = Literal["text", "jsonl", "parquet", "hub", "repository", "synthetic"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A file, a part of one, a repository, or a part of a source without files."""

    kind: PieceKind
    path: str
    """A path, or the source as it is written."""
    size: int = 0
    """Bytes of the file, and when it changed."""
    mtime_ns: int = 0
    start: int = 0
    stop: int | None = None
    """Bytes of a JSONL file, row groups of a Parquet file, or numbers of synthetic documents; None:
    to the end."""
    state: str = ""
    """A hash that changes with the files of a repository, or with the filler of documents."""
    cost: int
    """Bytes to read."""

    @property
    def is_of_file(self) -> bool:
        """Whether it is a file or a part of one."""
        return self.kind in ("text", "jsonl", "parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The work of one task."""

    source: str
    """The name of the source."""
    pieces: tuple[Piece, ...]

    @property
    def cost(self) -> int:
        """Bytes to read."""
        return sum(piece.cost for piece in self.pieces)

    def line(self) -> str:
        """Return the shard as a line of JSON."""
        return json.dumps({"source": self.source, "pieces": [asdict(p) for p in self.pieces]})

    @classmethod
    def of_line(cls, line: str | bytes) -> "Shard":
        """Return the shard of a line."""
        content = json.loads(line)
        pieces = tuple(Piece(**piece) for piece in content["pieces"])
        return cls(source=content["source"], pieces=pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSource:
    """A source of the store."""

    name: str
    origin: str
    kind: Kind
    skipped: dict[str, int]
    """Files that are not read, by reason."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What tasks depend on, except their shard and the tokenizer."""

    text_key: str
    heldout_fraction: float
    seed: int
    first_token: bool = True
    """Whether documents begin with what the tokenizer puts first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All shards of a store, in the order of the store."""

    settings: Settings
    tokenizer: dict[str, Any]
    """What the tokenizer is loaded from or trained to."""
    sources: tuple[PlannedSource, ...]
    shards: tuple[Shard, ...]

    @property
    def cost(self) -> int:
        """Bytes to read."""
        return sum(shard.cost for shard in self.shards)

    @property
    def sha256(self) -> str:
        """Identity of the plan."""
        digest = hashlib.sha256(json.dumps(self.head(), sort_keys=True).encode())
        for shard in self.shards:
            digest.update(shard.line().encode())
        return digest.hexdigest()

    def head(self) -> dict[str, Any]:
        """Return everything but the shards, for JSON."""
        return {
            "settings": asdict(self.settings),
            "tokenizer": self.tokenizer,
            "sources": [asdict(source) for source in self.sources],
        }

    @classmethod
    def of(cls, head: dict[str, Any], lines: Iterable[str | bytes]) -> "Plan":
        """Return the plan of what `head` and `Shard.line` returned."""
        return cls(
            settings=Settings(**head["settings"]),
            tokenizer=head["tokenizer"],
            sources=tuple(PlannedSource(**source) for source in head["sources"]),
            shards=tuple(map(Shard.of_line, lines)),
        )


def plan_of(
    sources: Sequence[tuple[str, str | None]],
    settings: Settings,
    tokenizer: dict[str, Any],
    file_format: Format | None = None,
    skip: Sequence[str] = (),
) -> Plan:
    """Return the plan of named sources; raise SourceError for one that cannot be read whole.

    Args:
        file_format: of all files; None: that of each by its content.
        skip: patterns of the files that are left out, such as `*.png` or `images/*`.
    """
    planned, shards, left_out = [], [], 0
    patterns = _patterns(skip)
    for name, source in sources:
        skipped = Counter[str]()
        pieces = list(_pieces(source, file_format, patterns, skipped))
        left_out += skipped["left_out"]
        least = MADE_BYTES if kind_of(source) == "synthetic" else SHARD_BYTES
        limit = max(least, sum(piece.cost for piece in pieces) // MOST_SHARDS)
        shards += [
            Shard(source=name, pieces=tuple(group))
            for group in _groups(_cut(pieces, limit, settings.text_key), limit)
        ]
        kind = kind_of(source)
        planned.append(
            PlannedSource(name=name, origin=_origin(source), kind=kind, skipped=dict(skipped))
        )
    if skip and not left_out:
        of = ", ".join(source_name(source) for _, source in sources)
        raise SourceError(
            f"--skip {' '.join(skip)} is of no file of {of}; name files, or paths below the "
            "source, as in '*.png' or 'images/*'"
        )
    return Plan(
        settings=settings, tokenizer=tokenizer, sources=tuple(planned), shards=tuple(shards)
    )


def _origin(source: str | None) -> str:
    """Return what a manifest says of a source: its paths do not depend on the working folder."""
    if source is None or source.startswith(HUB_PREFIX):
        return source_name(source)
    return absolute(source) if kind_of(source) != "documents" else str(Path(source).resolve())


def _pieces(
    source: str | None, stated: Format | None, patterns: Sequence[str], skipped: Counter[str]
) -> Iterator[Piece]:
    """Yield a source as whole files or repositories, or as the one piece it is."""
    if source is not None and kind_of(source) == "synthetic":
        made = synthetic(source)
        yield Piece(
            kind="synthetic", path=absolute(source), stop=len(made), state=made.state,
            cost=len(made) * made.size(0),
        )  # fmt: skip
        return
    if source is not None and kind_of(source) == "repositories":
        for folder in RepositoriesSource(source).folders:
            size, state = measure(folder)
            yield Piece(
                kind="repository", path=str(folder.absolute()), state=state, cost=max(1, size)
            )
        return
    if source is not None and source.startswith(HUB_PREFIX):
        yield Piece(kind="hub", path=source, cost=0)
        return
    if source is None:
        yield from (_file(path, "text") for path in library_files())
        return
    unread, is_first_text = [], stated is None
    for path in source_files(source):
        if _is_left_out(path, Path(source), patterns):
            skipped["left_out"] += 1
            continue
        kind = format_of(path, stated)
        if isinstance(kind, Unusable):
            unread.append((path, kind))
            continue
        if kind == "text" and is_first_text:
            is_first_text = False
            if _holds_json_lines(path):
                say(f"note: {path} holds lines of JSON and is read as one text, as its ending says;"
                    " --format jsonl reads each line as a document")  # fmt: skip
        yield _file(path, kind)
    if unread:
        raise not_read(unread)


def _patterns(skip: Sequence[str]) -> list[str]:
    """Return patterns in lower case: of files as they are stated, and of what a folder holds."""
    stated = [pattern.lower().removeprefix("./").rstrip("/") for pattern in skip]
    return [*stated, *(f"{pattern}/*" for pattern in stated)]


def _is_left_out(path: Path, root: Path, patterns: Sequence[str]) -> bool:
    """Return whether a pattern is of a file's name or of its path below the source."""
    names = (path.name.lower(), path.relative_to(root).as_posix().lower())
    return any(fnmatch(name, pattern) for pattern in patterns for name in names)


def _holds_json_lines(path: Path) -> bool:
    with suppress(SourceError):  # a text may begin as a compressed file does
        return content_format(path) == "jsonl" and path.stat().st_size > 0
    return False


def _file(path: Path, kind: Format) -> Piece:
    try:
        facts = path.stat()
    except OSError as error:
        raise SourceError(f"{path} cannot be read ({error.strerror})") from error
    return Piece(
        kind=kind, path=str(path.absolute()), size=facts.st_size, mtime_ns=facts.st_mtime_ns,
        cost=facts.st_size,
    )  # fmt: skip


def _cut(pieces: Iterable[Piece], limit: int, text_key: str) -> Iterator[Piece]:
    """Yield pieces of at most about `limit` bytes, where a format can be cut."""
    for piece in pieces:
        if piece.kind == "parquet":
            yield from _row_group_ranges(piece, limit, text_key)
        elif piece.kind == "jsonl" and compression(Path(piece.path)) is None:
            yield from _line_ranges(piece, limit)
        elif piece.kind == "synthetic":
            yield from _number_ranges(piece, limit)
        else:
            yield piece


def _line_ranges(piece: Piece, limit: int) -> Iterator[Piece]:
    try:
        starts = line_starts(Path(piece.path), piece.size, limit)
    except OSError as error:
        raise SourceError(f"{piece.path} cannot be read ({error.strerror})") from error
    for start, stop in zip(starts, [*starts[1:], piece.size], strict=True):
        yield _part(piece, start, stop, stop - start)


def _row_group_ranges(piece: Piece, limit: int, text_key: str) -> Iterator[Piece]:
    """Yield groups of row groups; the column is looked for in every file before the work begins."""
    sizes = row_groups(Path(piece.path), text_key).bytes
    start = cost = 0
    for number, size in enumerate(sizes):
        if cost and cost + size > limit:
            yield _part(piece, start, number, cost)
            start, cost = number, 0
        cost += size
    yield _part(piece, start, len(sizes), cost)


def _number_ranges(piece: Piece, limit: int) -> Iterator[Piece]:
    """Yield ranges of documents, which are of equal cost."""
    documents = piece.stop or 0
    each = piece.cost // documents
    step = max(1, limit // each)
    for start in range(0, documents, step):
        stop = min(start + step, documents)
        yield _part(piece, start, stop, (stop - start) * each)


def _part(piece: Piece, start: int, stop: int, cost: int) -> Piece:
    return Piece(
        kind=piece.kind, path=piece.path, size=piece.size, mtime_ns=piece.mtime_ns, start=start,
        stop=stop, state=piece.state, cost=cost,
    )  # fmt: skip


def _groups(pieces: Iterable[Piece], limit: int) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    cost = 0
    for piece in pieces:
        if group and cost + piece.cost > limit:
            yield group
            group, cost = [], 0
        cost += piece.cost
        group.append(piece)
    if group:
        yield group
