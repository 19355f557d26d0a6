# SPDX-License-Identifier: Apache-2.0
"""The format of a file, by its content.

A file with an ending or a name of a text (`TEXT_ENDINGS`, `TEXT_NAMES`) is one text, whatever it
holds: a tutorial may quote lines of JSON. Any other file is what its first bytes are, compressed or
not: Parquet, or lines of JSON. Where these do not tell, as in a damaged file, its ending does.
"""

import json
import re
from pathlib import Path
from typing import Literal, get_args

from data.formats.jsonl import beginning
from data.formats.records import Unusable

Format = Literal["jsonl", "parquet", "text"]
FORMATS: tuple[Format, ...] = get_args(Format)

# fmt: off
TEXT_ENDINGS = frozenset({
    ".txt", ".text", ".md", ".markdown", ".rst", ".org", ".adoc", ".tex", ".html", ".htm",
    ".xml", ".srt",
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".cuh", ".java",
    ".kt", ".scala", ".js", ".jsx", ".mjs", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".pl",
    ".lua", ".r", ".jl", ".swift", ".cs", ".hs", ".ml", ".ex", ".erl", ".clj", ".f90", ".f",
    ".sql", ".sh", ".bash", ".zig", ".v", ".sv", ".vhd", ".css", ".scss", ".vue", ".svelte",
    ".dart", ".m", ".mm", ".proto", ".cmake", ".gradle", ".ps1", ".bat", ".tcl", ".nix", ".bib",
    ".yaml", ".yml", ".toml", ".ini", ".cfg",
})
TEXT_NAMES = frozenset({
    "readme", "license", "notice", "copying", "authors", "changelog", "makefile", "dockerfile",
})
# fmt: on


def format_of(path: Path, stated: Format | None = None) -> Format | Unusable:
    """Return the format of a file, or why it is not read; raise SourceError for a damaged one."""
    if not path.is_file():
        return _not_read("a link to a folder" if path.is_dir() else "a link to nothing")
    is_text = path.suffix.lower() in TEXT_ENDINGS or path.name.lower() in TEXT_NAMES
    if stated is not None or is_text:
        return stated or "text"
    return content_format(path)


def content_format(path: Path) -> Format | Unusable:
    """Return what `format_of` returns of a file, without regard to an ending of a text."""
    head = beginning(path)
    if head.startswith(b"PAR1"):
        return "parquet"
    first, *more = head.removeprefix(b"\xef\xbb\xbf").lstrip().splitlines() or [b""]
    several = any(map(bytes.strip, more))
    if re.match(rb'\[\s*([{"]|$)', first) and not (several and _is_json(first)):
        return _not_read("one JSON array; write one document a line: jq -c '.[]'")
    if first.startswith(b"{") and several and re.search(rb"[{\[,]\s*$", first):
        return _not_read("JSON over several lines; write one document a line: jq -c .")
    is_json = first.startswith(b"{") and (not several or any(map(_is_json, (first, *more))))
    if is_json or not first:  # an empty file, such as Spark's _SUCCESS, has no record
        return "jsonl"
    endings = [suffix.lower() for suffix in path.suffixes]
    if ".jsonl" in endings or ".ndjson" in endings:
        return "jsonl"
    if endings[-1:] == [".parquet"]:
        return "parquet"
    return _not_read("neither Parquet nor lines of JSON, and without an ending of a text")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _not_read(why: str) -> Unusable:
    return Unusable("not_read", why)
