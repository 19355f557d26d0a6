# SPDX-License-Identifier: Apache-2.0
"""Find the pairs of token file and index that paths mean, and give each a source's name.

A path is a folder (every pair in it, recursively, in sorted order), either file of a pair, or the
prefix that both have, as Megatron takes it. The name is the file's, shortened to what a source may
be called: `CC-MAIN-2024_text_document.bin` is `cc-main-2024`, and `train-code.bin`, as a store of
several sources has it, is `code`.
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
    def parse(cls, word: str) -> "Named":
        """Return the path and name of `NAME=PATH`."""
        name, equals, path = word.partition("=")
        if not equals or not path or SOURCE_NAME.fullmatch(name) is None:
            raise AdoptionError(
                f"--name {word} is not NAME=PATH with a name of lower-case letters, digits, - and "
                f"_, at most {LONGEST_NAME}; write it like --name web=/data/web_text_document"
            )
        return cls(path=Path(path), name=name)

    @classmethod
    def of(cls, path: Path) -> "Named":
        """Return a path, or the path and name of `NAME=PATH` if no such path exists."""
        name, _, rest = str(path).partition("=")
        files = (path, *(path.with_name(path.name + ending) for ending in ENDINGS))
        if rest and SOURCE_NAME.fullmatch(name) and not any(file.exists() for file in files):
            return cls(path=Path(rest), name=name)
        return cls(path=path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A token file with its index, and the name of the source that it will be."""

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


def pairs_of(paths: Sequence[Named]) -> list[Pair]:
    """Return the pairs that paths mean, in order, each once.

    Raises:
        AdoptionError: for a path without a pair, half a pair, and two pairs of one name.
    """
    found: list[Pair] = []
    taken: dict[str, Path] = {}
    names = {os.path.realpath(prefix): given for given in paths if given.name
             for prefix in _prefixes(given.path)}  # fmt: skip
    seen: set[str] = set()
    for given in paths:
        prefixes = _prefixes(given.path)
        for number, prefix in enumerate(prefixes):
            real = os.path.realpath(prefix)
            if real in seen:
                continue
            seen.add(real)
            name = names[real].name if real in names else None
            if name is None:
                name = source_name(prefix.name)
            elif len(prefixes) > 1:
                name = f"{name[: LONGEST_NAME - 6]}-{number:05d}"
            if name in taken:
                raise AdoptionError(
                    f"{taken[name]} and {prefix} would both be the source {name}; name one of them "
                    f"with --name NAME={prefix}"
                )
            taken[name] = prefix
            found.append(Pair(name=name, prefix=prefix))
    return found


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
                if not any(part.startswith(".") for part in file.relative_to(path).parts)
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
