# SPDX-License-Identifier: Apache-2.0
"""Read documents, one at a time, from a folder, a file, the hub or the standard library.

A source is written as one string:

    PATH                       a folder: text files (one document each) and the record files
                               below, recursively, in sorted order; names that begin with a dot
                               are skipped
    FILE                       its format is that of its content (`data.formats.by_content`): a
                               text, one document; lines of JSON, an object with the text under
                               the text key each, compressed or not; or Parquet, one document a row
    hf:NAME[:CONFIG][@SPLIT]   a data set of the Hugging Face hub, streamed; the split is "train"
                               if not given
    None                       the Python standard library of the interpreter in use

An unusable record is an error that names its place. With `skip_broken` it is counted instead. Empty
documents are always skipped and counted. A file of another format is counted here, where samples
are read; `longhaul prepare` refuses it. A source without a single document is an error.

`documents` yields whole texts. `records` has the records of a source, in which a long text is read
in chunks (`data.formats`); `data.preparation` reads them in pieces, on several processes.

Only the standard library is imported here; pyarrow and datasets are loaded when a source needs
them.
"""

import os
import platform
import shlex
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from data.formats.by_content import FORMATS, format_of
from data.formats.hub import hub_rows
from data.formats.jsonl import jsonl_file
from data.formats.parquet import parquet_file
from data.formats.records import (
    LEFT_OUT,
    LongText,
    Record,
    SkipReason,
    SourceError,
    Unusable,
    UnusableError,
    text_advice,
)
from data.formats.text import text_file

__all__ = ["LEFT_OUT", "Document", "SkipReason", "SourceError", "documents", "records"]

HUB_PREFIX = "hf:"

LOOKED_AT = 100
"""Records that are looked at for the field of the text after a first one without it."""
SHOWN, MOST_KINDS = 5, 20
"""Files that are not read: those that a message names with the reason, and kinds for --skip."""
MAX_DOCUMENT_BYTES = 256 * 2**20
"""Cap on a document that `documents` yields as a whole."""


class Document(NamedTuple):
    """A text and where it was found."""

    text: str
    origin: str


def source_name(source: str | None) -> str:
    """Return the name under which a source is written into a manifest."""
    return source if source is not None else f"python-stdlib-{platform.python_version()}"


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
    rest = records(source, text_key)
    for origin, content in rest:
        judged = judge(_whole(content))
        if isinstance(judged, str):
            found += 1
            yield Document(judged, str(origin))
            continue
        if judged.reason == "broken" and not skip_broken:
            raise broken(origin, judged, () if found else rest)
        counts[judged.reason] += 1
    if not found:
        raise without_documents(source, counts)


def broken(origin: object, found: Unusable, following: Iterable[Record] = ()) -> SourceError:
    """Return the error of a broken record.

    `following` are the records after it, if none before it could be used: where they lack the field
    of the text as well, the field has another name.
    """
    if found.fields and following:
        contents = [found, *(content for _, content in islice(following, LOOKED_AT))]
        lacking = [c.fields for c in contents if isinstance(c, Unusable) and c.fields is not None]
        if len(lacking) == len(contents):
            return SourceError(f"{origin}: {found.problem}; {text_advice(lacking)}")
    return SourceError(
        f"{origin}: {found.problem}; fix it, or skip such records with --skip-broken"
    )


def without_documents(source: str | None, skipped: Counter[str]) -> SourceError:
    """Return the error of a source that holds no document."""
    left_out = ", ".join(f"{number} {LEFT_OUT[why]}" for why, number in sorted(skipped.items()))
    detail = f" (left out: {left_out})" if left_out else ""
    return SourceError(
        f"the source {source_name(source)} holds no document{detail}; name a file or a folder"
        " with text"
    )


def judge(content: str | Unusable) -> str | Unusable:
    """Return the problem of a text that is not a document, else what is given."""
    if isinstance(content, Unusable):
        return content
    if not content or content.isspace():
        return EMPTY
    try:
        content.encode()
    except UnicodeEncodeError:
        return HALF_SURROGATE
    return content


def _whole(content: str | LongText | Unusable) -> str | Unusable:
    """Return a long text as a whole, if it is not longer than `MAX_DOCUMENT_BYTES`."""
    if isinstance(content, str | Unusable):
        return content
    chunks, size = [], 0
    try:
        for chunk in content.chunks():
            chunks.append(chunk)
            size += len(chunk.encode(errors="surrogatepass"))
            if size > MAX_DOCUMENT_BYTES:
                too_long = f"the document is longer than {MAX_DOCUMENT_BYTES:,} bytes"
                return Unusable("broken", too_long)
    except UnusableError as error:
        return error.found
    return "".join(chunks)


EMPTY = Unusable("empty", "the text is empty")
HALF_SURROGATE = Unusable("broken", "the text has half of a surrogate pair, which is not Unicode")


def records(source: str | None, text_key: str) -> Iterator[Record]:
    """Yield every record of a source, in order."""
    if source is None:
        for path in library_files():
            yield from text_file(path)
        return
    if source.startswith(HUB_PREFIX):
        yield from hub_rows(source, HUB_PREFIX, text_key)
        return
    for file in source_files(source):
        found = format_of(file)
        if isinstance(found, Unusable):
            if file == Path(source):
                raise not_read([(file, found)])
            yield Record(file, found)
        elif found == "jsonl":
            yield from jsonl_file(file, text_key)
        elif found == "parquet":
            yield from parquet_file(file, text_key)
        else:
            yield from text_file(file)


def library_files() -> Iterator[Path]:
    """Yield the source files of the Python standard library that are UTF-8 text."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in _files(library, left_out=("site-packages", "dist-packages")):
        if path.suffix == ".py" and isinstance(next(text_file(path)).content, str):
            yield path


def source_files(source: str) -> Iterator[Path]:
    """Yield the files of a source that is a file or a folder, and links that lead to no file.

    Raises SourceError for a path that does not exist.
    """
    path = Path(source)
    if path.is_dir():
        yield from _files(path)
    elif path.is_file():
        yield path
    else:
        raise SourceError(
            f"the source {source} does not exist ({path.absolute()}); name a folder, a text file, "
            "FILE.jsonl, FILE.parquet or hf:NAME"
        )


def not_read(files: Sequence[tuple[Path, Unusable]]) -> SourceError:
    """Return the error of files of a source that are not read, each with the reason."""
    shown = "; ".join(f"{path} ({why.problem})" for path, why in files[:SHOWN])
    more = f"; and {len(files) - SHOWN:,} more" if len(files) > SHOWN else ""
    endings = Counter(path.suffix for path, _ in files if path.suffix)
    kinds = dict.fromkeys(
        f"*{path.suffix}" if endings[path.suffix] > 1 else path.name for path, _ in files
    )
    skips = " ".join(f"--skip {shlex.quote(kind)}" for kind in list(kinds)[:MOST_KINDS])
    return SourceError(
        f"not read: {shown}{more}; convert them, state their format with --format "
        f"{'|'.join(FORMATS)}, or leave them out with {skips}"
    )


def _files(root: Path, left_out: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield the files below a folder, sorted by name within each; of links to folders, the link."""

    def refuse(error: OSError) -> None:
        raise SourceError(f"the folder {error.filename} cannot be read ({error.strerror})")

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in ("__pycache__", *left_out)
        )
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in sorted([*names, *links]):
            if not name.startswith("."):
                yield Path(folder, name)
