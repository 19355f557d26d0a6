# SPDX-License-Identifier: Apache-2.0
"""Each repository in a folder as one document: its Python files in the order of their imports.

A source is written `repositories:PATH`. PATH is a repository (it has `.git` or one of
PROJECT_FILES), or a folder whose folders are repositories, whatever they have in them.

Before each file is a comment with its path in the repository, as in the data of DeepSeek-Coder
(arXiv 2401.14196). StarCoder2 (arXiv 2402.19173) and Qwen2.5-Coder (arXiv 2409.12186) have special
tokens there instead, into which the text of a document is never turned here.

Files that are left out, and counted: those of another ending than text or code, those that are not
UTF-8, those of more than FILE_BYTES, which are mostly data or generated, and all that follow once
the document has DOCUMENT_BYTES. Hidden files, links and the folders of LEFT_OUT_FOLDERS are passed
over without a count.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import ClassVar, NamedTuple

from data.files.nearest import near_path
from data.formats.by_content import TEXT_ENDINGS
from data.readers import Document, SourceError
from data.repositories.dependencies import imports_of, in_order

PREFIX = "repositories:"

PROJECT_FILES = (
    "pyproject.toml", "setup.py", "setup.cfg", "package.json", "Cargo.toml", "go.mod", "pom.xml",
    "build.gradle", "build.gradle.kts", "CMakeLists.txt", "meson.build", "configure.ac", "Makefile",
    "Gemfile", "composer.json",
)  # fmt: skip
ENDINGS = TEXT_ENDINGS | {".toml", ".yaml", ".yml", ".cfg", ".ini", ".cmake", ".proto"}
NAMES = frozenset({"Makefile", "Dockerfile", "README", "LICENSE", "COPYING"})
LEFT_OUT_FOLDERS = frozenset({"node_modules", "site-packages", "dist-packages", "__pycache__"})
FILE_BYTES = 2**20
DOCUMENT_BYTES = 32 * 2**20
"""Some 8M tokens."""

# fmt: off
COMMENTS = {
    "//": (
        ".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala",
        ".js", ".jsx", ".mjs", ".ts", ".tsx", ".go", ".rs", ".php", ".swift", ".cs", ".zig", ".v",
        ".sv", ".proto",
    ),
    "--": (".lua", ".hs", ".sql", ".vhd"),
    "%": (".tex", ".erl"),
    ";": (".clj",),
    "!": (".f90", ".f"),
    "..": (".rst",),
}
# fmt: on
COMMENT_OF = {ending: mark for mark, endings in COMMENTS.items() for ending in endings}
MARKUP = frozenset({".md", ".markdown", ".html", ".htm", ".xml"})


class RepositoriesSource:
    """The repositories of a source that is written `repositories:PATH`, by number."""

    kind: ClassVar = "repositories"

    def __init__(self, source: str) -> None:
        """List the repositories; raise SourceError for a path that has none."""
        self.origin = source
        word = source.removeprefix(PREFIX)
        root = Path(word)
        if not word or not root.is_dir():
            raise SourceError(
                f"{source} does not name a folder{near_path(root) if word else ''}; write"
                f" {PREFIX}PATH, where PATH is a repository or a folder of repositories"
            )
        try:
            self.folders = [root] if is_repository(root) else _folders_in(root)
        except OSError as error:
            raise SourceError(f"{source} cannot be read ({error.strerror})") from error
        if not self.folders:
            raise SourceError(
                f"{source} has no folders, and is not a repository itself (no .git, no"
                f" {PROJECT_FILES[0]} or the like); name a folder of repositories"
            )

    def __len__(self) -> int:
        """Return the number of repositories."""
        return len(self.folders)

    def document(self, number: int, skipped: Counter[str]) -> Document:
        """Return a repository as one text; `skipped` receives the files that are left out."""
        folder = self.folders[number]
        return Document(joined(folder, skipped), str(folder))

    def size(self, number: int) -> int:
        """Return the bytes of the files of a repository."""
        return measure(self.folders[number]).bytes


class Measurement(NamedTuple):
    """What is known of a repository before its files are read."""

    bytes: int
    """Estimated bytes of its document."""
    state: str
    """A hash of the paths of its files, and of the size and time of change of each text file."""


def measure(folder: Path) -> Measurement:
    """Return the size and the state of a repository; raise SourceError if it cannot be read."""
    total = 0
    digest = hashlib.blake2b(digest_size=16)
    for path in _files(folder):
        digest.update(os.fsencode(path) + b"\0")
        if not _is_text(path):
            continue
        try:
            facts = (folder / path).stat()
        except OSError as error:
            raise SourceError(f"{folder / path} cannot be read ({error.strerror})") from error
        digest.update(f"{facts.st_size} {facts.st_mtime_ns}\0".encode())
        if facts.st_size <= FILE_BYTES:
            total += facts.st_size
    return Measurement(min(total, DOCUMENT_BYTES), digest.hexdigest())


def is_repository(folder: Path) -> bool:
    """Return whether a folder has `.git` or a file that describes a project."""
    return any((folder / name).exists() for name in (".git", *PROJECT_FILES))


def joined(folder: Path, skipped: Counter[str]) -> str:
    """Return the files of a repository as one text, Python behind the files that it imports."""
    texts: dict[str, str] = {}
    for path in _files(folder):
        if not _is_text(path):
            skipped["other_ending"] += 1
            continue
        file = folder / path
        try:
            if file.stat().st_size > FILE_BYTES:
                skipped["too_large"] += 1
                continue
            text = file.read_bytes().decode("utf-8-sig")
        except OSError as error:
            raise SourceError(f"{file} cannot be read ({error.strerror})") from error
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            skipped["undecodable"] += 1
        elif text and not text.isspace():
            texts[path] = text
    parts: list[str] = []
    size = 0
    ordered = in_order(texts, imports_of(texts))
    for place, path in enumerate(ordered):
        part = f"{header(path)}\n{texts[path].rstrip()}\n"
        size += len(part.encode()) + 1
        if size > DOCUMENT_BYTES:
            skipped["too_large"] += len(ordered) - place
            break
        parts.append(part)
    return "\n".join(parts)


def header(path: str) -> str:
    """Return a line with the path of a file, as a comment of the file's language."""
    ending = PurePosixPath(path).suffix.lower()
    if ending in MARKUP:
        return f"<!-- {path} -->"
    return f"{COMMENT_OF.get(ending, '#')} {path}"


def _folders_in(root: Path) -> list[Path]:
    return sorted(
        folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith(".")
    )


def _files(folder: Path) -> Iterator[str]:
    """Yield the paths of regular files that are not hidden, relative to the folder."""

    def refuse(error: OSError) -> None:
        raise SourceError(f"the folder {error.filename} cannot be read ({error.strerror})")

    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in LEFT_OUT_FOLDERS
        )
        for name in sorted(names):
            file = Path(place, name)
            if not name.startswith(".") and file.is_file() and not file.is_symlink():
                yield file.relative_to(folder).as_posix()


def _is_text(path: str) -> bool:
    file = PurePosixPath(path)
    return file.suffix.lower() in ENDINGS or file.name in NAMES
