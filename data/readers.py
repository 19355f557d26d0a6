# SPDX-License-Identifier: Apache-2.0
"""Read documents, one at a time, from a folder, a file, the hub or the standard library.

A source is written as one string:

    PATH                       a folder: text files (one document each) and the record files
                               below, recursively, in sorted order; names that begin with a dot
                               are skipped
    FILE.txt                   one document (any of TEXT_ENDINGS)
    FILE.jsonl[.gz|.zst]       one document a line, an object with the text under the text key
    FILE.parquet               one document a row, the column named by the text key
    hf:NAME[:CONFIG][@SPLIT]   a data set of the Hugging Face hub, streamed; the split is "train"
                               if not given
    None                       the Python standard library of the interpreter in use

An unusable record is an error that names its place. With `skip_broken` it is counted instead. Files
that are not UTF-8 text, files with other endings and empty documents are always skipped and
counted. A source without a single document is an error.

Only the standard library is imported here; pyarrow and datasets are loaded when a source needs
them.
"""

import gzip
import io
import json
import os
import platform
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

# fmt: off
TEXT_ENDINGS = frozenset({
    ".txt", ".text", ".md", ".markdown", ".rst", ".org", ".adoc", ".tex", ".html", ".htm",
    ".xml", ".srt",
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".cuh", ".java",
    ".kt", ".scala", ".js", ".jsx", ".mjs", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".pl",
    ".lua", ".r", ".jl", ".swift", ".cs", ".hs", ".ml", ".ex", ".erl", ".clj", ".f90", ".f",
    ".sql", ".sh", ".bash", ".zig", ".v", ".sv", ".vhd",
})
# fmt: on
JSONL_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PARQUET_ENDING = ".parquet"
HUB_PREFIX = "hf:"

MAX_DOCUMENT_BYTES = 256 * 2**20
"""Cap on one document and on one JSONL line; an endless line would otherwise fill the memory."""

PARQUET_ROWS = 256
"""Rows read at once; a row may be a whole book."""

SkipReason = Literal["broken", "undecodable", "empty", "other_ending"]


LEFT_OUT: dict[str, str] = {
    "broken": "broken",
    "undecodable": "not UTF-8 text",
    "empty": "empty",
    "other_ending": "with an ending that is not known",
}
"""Each reason as words in a message."""


class SourceError(ValueError):
    """A source that cannot be read; the message says where and why in one sentence."""


class Document(NamedTuple):
    """A text and where it was found."""

    text: str
    origin: str


@dataclass(frozen=True, slots=True)
class _Unusable:
    """The problem of a record, and whether it is an error or only counted."""

    reason: SkipReason
    problem: str


_Record = tuple[str, str | _Unusable]
"""Where it was found, and its text or its problem."""

_Reader = Callable[[Path, str], Iterator[_Record]]


def source_name(source: str | None) -> str:
    """Return the name under which a source is written into a manifest."""
    return source if source is not None else f"python-stdlib-{platform.python_version()}"


def stored_bytes(source: str | None) -> int:
    """Return the bytes of the files that a source is read from; 0 if it is not a file or folder.

    Compressed files count with their compressed size, so the text is at least this large.
    """
    path = Path("" if source is None or source.startswith(HUB_PREFIX) else source)
    if source is None or path == Path():
        return 0
    files = _files(path) if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file() and _reader(file))


def documents(
    source: str | None,
    *,
    text_key: str = "text",
    skip_broken: bool = False,
    skipped: Counter[str] | None = None,
) -> Iterator[Document]:
    """Yield every document of a source in an order that does not change from call to call.

    Args:
        skipped: receives the number of skipped records, by `SkipReason`.

    Raises:
        SourceError: for a source that is missing, damaged or empty, and, unless `skip_broken`,
            for the first broken record.
    """
    counts = Counter[str]() if skipped is None else skipped
    found = 0
    for origin, content in _records(source, text_key):
        judged = _judge(content)
        if isinstance(judged, str):
            found += 1
            yield Document(judged, origin)
            continue
        if judged.reason == "broken" and not skip_broken:
            raise SourceError(
                f"{origin}: {judged.problem}; fix it, or skip such records with --skip-broken"
            )
        counts[judged.reason] += 1
    if not found:
        left_out = ", ".join(f"{number} {LEFT_OUT[why]}" for why, number in sorted(counts.items()))
        detail = f" (left out: {left_out})" if left_out else ""
        raise SourceError(
            f"the source {source_name(source)} holds no document{detail}; name a file or a folder"
            " with text"
        )


def _judge(content: str | _Unusable) -> str | _Unusable:
    if isinstance(content, _Unusable):
        return content
    if not content or content.isspace():
        return _Unusable("empty", "the text is empty")
    try:
        size = len(content.encode())
    except UnicodeEncodeError:
        return _Unusable("broken", "the text has half of a surrogate pair, which is not Unicode")
    if size > MAX_DOCUMENT_BYTES:
        return _too_long("the document")
    return content


def _too_long(what: str) -> _Unusable:
    return _Unusable("broken", f"{what} is longer than {MAX_DOCUMENT_BYTES:,} bytes")


def _records(source: str | None, text_key: str) -> Iterator[_Record]:
    if source is None:
        library = Path(sysconfig.get_path("stdlib"))
        for path in _files(library, left_out=("site-packages", "dist-packages")):
            if path.suffix == ".py":
                yield from _text_file(path, text_key)
        return
    if source.startswith(HUB_PREFIX):
        yield from _hub(source, text_key)
        return
    path = Path(source)
    if path.is_dir():
        for file in _files(path):
            reader = _reader(file)
            if reader is None:
                yield str(file), _Unusable("other_ending", "the ending is not known")
            else:
                yield from reader(file, text_key)
        return
    if not path.is_file():
        raise SourceError(
            f"the source {source} does not exist ({path.absolute()}); name a folder, a text file, "
            "FILE.jsonl, FILE.parquet or hf:NAME"
        )
    reader = _reader(path)
    if reader is None:
        known = ", ".join((*JSONL_ENDINGS, PARQUET_ENDING, ".txt and other text"))
        raise SourceError(f"the source {source} has an ending that is not known; known: {known}")
    yield from reader(path, text_key)


def _reader(path: Path) -> _Reader | None:
    name = path.name.lower()
    if name.endswith(JSONL_ENDINGS):
        return _jsonl_file
    if name.endswith(PARQUET_ENDING):
        return _parquet_file
    return _text_file if path.suffix.lower() in TEXT_ENDINGS else None


def _files(root: Path, left_out: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield the regular files below a folder, sorted by name within each folder."""

    def refuse(error: OSError) -> None:
        raise SourceError(f"the folder {error.filename} cannot be read ({error.strerror})")

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in left_out
        )
        files = (Path(folder, name) for name in sorted(names) if not name.startswith("."))
        yield from (file for file in files if file.is_file())


def _text_file(path: Path, text_key: str) -> Iterator[_Record]:
    """Yield the one document of a text file, which has no records and needs no text key."""
    del text_key
    try:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            yield str(path), _too_long("the file")
            return
        content = path.read_bytes()
    except OSError as error:
        yield str(path), _Unusable("broken", f"cannot be read ({error.strerror})")
        return
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        yield str(path), _Unusable("undecodable", "the file is not UTF-8 text")
    else:
        yield str(path), text


def _jsonl_file(path: Path, text_key: str) -> Iterator[_Record]:
    for number, line in enumerate(_lines(path), 1):
        if isinstance(line, _Unusable):
            yield f"{path}:{number}", line
        elif line.strip():
            yield f"{path}:{number}", _text_of_line(line, text_key)


def _lines(path: Path) -> Iterator[bytes | _Unusable]:
    number = 0
    try:
        with _open(path) as stream:
            while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
                number += 1
                if len(line) <= MAX_DOCUMENT_BYTES:
                    yield line
                    continue
                while line and not line.endswith(b"\n"):
                    line = stream.readline(MAX_DOCUMENT_BYTES)
                yield _too_long("the line")
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(f"{path}: damaged or unreadable after line {number} ({error})") from error


def _open(path: Path) -> io.BufferedIOBase:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rb")
    if path.name.lower().endswith(".zst"):
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))
    return path.open("rb")


def _text_of_line(line: bytes, text_key: str) -> str | _Unusable:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return _Unusable("broken", f"invalid UTF-8 at byte {error.start} of the line")
    except json.JSONDecodeError as error:
        return _Unusable("broken", f"invalid JSON ({error.msg} at column {error.colno})")
    except (ValueError, RecursionError) as error:
        return _Unusable("broken", f"unusable JSON ({error})")
    if not isinstance(record, dict):
        return _Unusable("broken", f"not a JSON object but {_json_type(record)}")
    if text_key not in record:
        keys = ", ".join(repr(key) for key in list(record)[:8]) or "no field at all"
        return _Unusable("broken", f"no field {text_key!r}; the line has {keys}")
    return _text_of_field(record[text_key], text_key)


def _text_of_field(value: object, text_key: str) -> str | _Unusable:
    if isinstance(value, str):
        return value
    return _Unusable("broken", f"the field {text_key!r} is not a string but {_json_type(value)}")


def _json_type(value: object) -> str:
    names = {list: "an array", dict: "an object", str: "a string", bool: "a boolean"}
    if value is None:
        return "null"
    return names.get(type(value), "a number" if isinstance(value, int | float) else "another type")


def _parquet_file(path: Path, text_key: str) -> Iterator[_Record]:
    import pyarrow as pa
    from pyarrow import parquet

    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if text_key not in columns:
                raise SourceError(
                    f"{path}: no column {text_key!r}; the file has {', '.join(columns)}"
                )
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[text_key]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield f"{path} row {row}", _text_of_field(value, text_key)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise SourceError(f"{path}: unreadable Parquet after row {row} ({reason})") from error


def _hub(source: str, text_key: str) -> Iterator[_Record]:
    name, _, split = source.removeprefix(HUB_PREFIX).partition("@")
    name, _, config = name.partition(":")
    if not name:
        raise SourceError(
            f"the source {source} does not name a data set; write hf:NAME[:CONFIG][@SPLIT]"
        )
    row = 0
    try:
        import datasets

        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        for record in rows:
            row += 1
            if text_key not in record:
                raise SourceError(f"{source}: no field {text_key!r}; it has {', '.join(record)}")
            yield f"{source} row {row}", _text_of_field(record[text_key], text_key)
    except SourceError:
        raise
    except Exception as error:  # the hub's client raises errors of several unrelated libraries
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise SourceError(
            f"{source} cannot be read after row {row} ({reason}); on a machine without network"
            " give a local file or folder"
        ) from error
