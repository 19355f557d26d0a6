# SPDX-License-Identifier: Apache-2.0
"""Find the pairs of token file and index that paths mean, and the sources that they make.

A path is a folder (every pair in it, recursively, sorted by path), either file of a pair, or the
prefix that both have, as Megatron takes it. All pairs of the paths with one name, `web=PATH`, are
one source, in the order of the paths. A pair without a name is a source of its own, named after its
file as far as a source may be called so: `CC-MAIN-2024_text_document.bin` is `cc-main-2024`,
and `train-code.bin`, as a store of several sources has it, is `code`.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.files.nearest import near_path
from data.splits import SOURCE_NAME

ENDINGS = (".bin", ".idx")
LONGEST_NAME = 32
_SUFFIXES = ("_text_document", "_document", "_text")
"""Of Megatron's preprocess_data, which adds the JSON key and the level."""
_TRAIN = re.compile(r"train[-_](?=[a-z])")
"""Before the name of a source; what begins with a digit, as `train-00000-of-00016`, is a part."""


class AdoptionError(ValueError):
    """Files that cannot be adopted; the message names the file and what would be right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """A path and the name of its source, if the user gave one."""

    path: Path
    name: str | None = None

    @classmethod
    def of_word(cls, word: str) -> "Named":
        """Return what `PATH` or `NAME=PATH` says; a path that exists is never split."""
        name, equals, path = word.partition("=")
        is_name = bool(equals and path) and SOURCE_NAME.fullmatch(name) is not None
        if is_name and not any(Path(f"{word}{end}").exists() for end in ("", *ENDINGS)):
            return cls(path=Path(path), name=name)
        if equals and not is_name and "/" not in name and Path(path).exists():
            raise AdoptionError(
                f"{word}: {name!r} cannot name a source; use up to {LONGEST_NAME} lower-case "
                "letters, digits, - and _"
            )
        return cls(path=Path(word))

    @classmethod
    def parse(cls, word: str) -> "Named":
        """Return the path and name of `NAME=PATH`."""
        name, equals, path = word.partition("=")
        if not equals or not path or SOURCE_NAME.fullmatch(name) is None:
            raise AdoptionError(
                f"--name {word} is not NAME=PATH with a name of lower-case letters, digits, - and "
                f"_, at most {LONGEST_NAME}; write it like --name web=/data/web_text_document"
            )
        return cls(path=Path(path), name=name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A token file with its index, and the name of its source."""

    name: str
    prefix: Path
    """Both files without their endings."""

    @property
    def bin(self) -> Path:
        """The token file."""
        return self.prefix.with_name(self.prefix.name + ".bin")

    @property
    def idx(self) -> Path:
        """The index."""
        return self.prefix.with_name(self.prefix.name + ".idx")


def pairs_of(paths: Sequence[Named]) -> dict[str, list[Pair]]:
    """Return the pairs of each source that paths mean, in order, each once.

    Raises:
        AdoptionError: for a path without a pair, half a pair, a pair with two names, and two pairs
            of one name that is not given for both.
    """
    listed = [(given.name, prefix) for given in paths for prefix in _prefixes(given.path)]
    names = _given_names(listed)
    found: dict[str, list[Pair]] = {}
    seen: set[str] = set()
    unnamed: set[str] = set()
    for _, prefix in listed:
        real = os.path.realpath(prefix)
        if real in seen:
            continue
        seen.add(real)
        name = names.get(real) or source_name(prefix.name)
        if name in found and (name in unnamed or real not in names):
            raise AdoptionError(
                f"{found[name][0].prefix} and {prefix} would both be the source {name}; name one "
                f"of them with NAME={prefix}, or both if they are one source"
            )
        if real not in names:
            unnamed.add(name)
        found.setdefault(name, []).append(Pair(name=name, prefix=prefix))
    return found


def _given_names(listed: Sequence[tuple[str | None, Path]]) -> dict[str, str]:
    """Return the name that the user gave to each pair, by its real path."""
    names: dict[str, str] = {}
    for name, prefix in listed:
        if name is not None and names.setdefault(os.path.realpath(prefix), name) != name:
            other = names[os.path.realpath(prefix)]
            raise AdoptionError(
                f"{prefix} would be in the sources {other} and {name}; a pair is in one, so leave "
                "it out of the other"
            )
    return names


def source_name(file: str) -> str:
    """Return the name of a source after a file without its ending."""
    for suffix in _SUFFIXES:
        file = file.removesuffix(suffix)
    name = re.sub(r"[^a-z0-9_-]+", "-", file.lower()).lstrip("-_")
    name = _TRAIN.sub("", name, count=1) if _TRAIN.match(name) else name
    return name[:LONGEST_NAME].rstrip("-_") or "adopted"


def _prefixes(path: Path) -> list[Path]:
    if path.is_dir():
        prefixes = sorted(
            {
                file.with_suffix("")
                for ending in ENDINGS
                for file in path.rglob(f"*{ending}")
                if file.is_file()
                and not any(part.startswith(".") for part in file.relative_to(path).parts)
            }
        )
        if not prefixes:
            raise AdoptionError(
                f"the folder {path} has no token files: expected pairs such as web.bin and web.idx"
            )
    else:
        prefixes = [path.with_suffix("") if path.suffix in ENDINGS else path]
    for prefix in prefixes:
        _require_pair(prefix)
    return prefixes


def _require_pair(prefix: Path) -> None:
    files = [prefix.with_name(prefix.name + ending) for ending in ENDINGS]
    if files[0].is_dir():
        raise AdoptionError(
            f"{files[0]} is a folder: {prefix} is a source of several pairs of a store; name the "
            "files that this store was adopted from"
        )
    there = [file.is_file() for file in files]
    if not any(there):
        raise AdoptionError(
            f"there are no token files at {prefix}{near_path(files[0])}; name a folder, a file "
            ".bin or .idx, or the name that both have without their endings"
        )
    for file, exists in zip(files, there, strict=True):
        if not exists:
            raise AdoptionError(
                f"{file} is missing: Megatron writes two files of one name, .bin and .idx; restore "
                "it, or write both again"
            )
