# SPDX-License-Identifier: Apache-2.0
"""The documents of a store by split, source and length, and the files that they are in."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from data.files.sha256 import sha256_of

SOURCE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")

SourceKind = Literal["documents", "adopted", "synthetic", "repositories"]


class StoreError(ValueError):
    """A store that cannot be used; the message says which file and why in one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """Size and hash of a file of the store when it was written."""

    path: str
    """Relative to the store."""
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        """Refuse a path that leaves the store."""
        if not isinstance(self.bytes, int) or not isinstance(self.sha256, str):
            raise StoreError(f"the size or hash of {self.path!r} is not one")
        path = PurePosixPath(self.path)
        if path.is_absolute() or ".." in path.parts or "\\" in self.path or not path.parts:
            raise StoreError(f"the manifest names a file outside the store: {self.path!r}")

    @classmethod
    def of(cls, root: Path, path: str) -> "StoredFile":
        """Measure a file that has just been written."""
        file = root / path
        (sha256,) = sha256_of([file])
        return cls(path=path, bytes=file.stat().st_size, sha256=sha256)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBucket:
    """The documents of at least this many tokens and fewer than twice as many."""

    at_least: int
    documents: int
    tokens: int

    def __post_init__(self) -> None:
        """Refuse numbers that no documents have."""
        numbers = (self.at_least, self.documents, self.tokens)
        if not all(type(number) is int and number > 0 for number in numbers) or not (
            self.at_least * self.documents <= self.tokens < 2 * self.at_least * self.documents
        ):
            raise StoreError(f"no documents have the lengths {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFacts:
    """Where documents of a store come from."""

    name: str
    kind: SourceKind
    origin: str
    """An absolute path, a data set of the hub, or a generator with its settings."""
    licence: str | None = None
    sha256: str | None = None
    """Of the sorted list of path, bytes and SHA-256 of its files; None if one was not hashed."""

    def __post_init__(self) -> None:
        """Refuse a name that is not a part of a file's name, and an unknown kind."""
        if not isinstance(self.name, str) or SOURCE_NAME.fullmatch(self.name) is None:
            raise StoreError(
                f"the source name {self.name!r} has characters other than lower-case letters, "
                "digits, - and _, or more than 32"
            )
        if self.kind not in get_args(SourceKind):
            raise StoreError(
                f"the kind of source {self.name} is {self.kind!r}, not one of "
                f"{', '.join(get_args(SourceKind))}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The documents of one source in one split; token counts include one eod token a document."""

    source: str
    documents: int
    tokens: int
    longest: int
    """Tokens of the longest document."""
    lengths: tuple[LengthBucket, ...]
    bins: tuple[StoredFile, ...]
    """The token file, or those in a folder of its name: the index counts bytes through all."""
    idx: StoredFile

    def __post_init__(self) -> None:
        """Refuse files whose names are not that of the index, or not in the order of reading."""
        paths = [file.path for file in self.bins]
        whole = f"{self.prefix}.bin"
        in_folder = bool(paths) and all(
            path.endswith(".bin") and path.rpartition("/")[0] == whole for path in paths
        )
        if paths != [whole] and not (in_folder and paths == sorted(set(paths))):
            raise StoreError(
                f"{', '.join(paths[:3])} and {self.idx.path} are not the files of one split"
            )

    @property
    def prefix(self) -> str:
        """The name of the files without their endings, relative to the store."""
        return self.idx.path.removesuffix(".idx")


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The documents of one split, source by source."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        """Refuse a split without documents, and two parts of one source."""
        names = [part.source for part in self.parts]
        if not names or len(set(names)) != len(names):
            raise StoreError(f"the parts of a split are of the sources {names}; one of each")

    @property
    def documents(self) -> int:
        """Documents of all sources."""
        return sum(part.documents for part in self.parts)

    @property
    def tokens(self) -> int:
        """Tokens of all sources."""
        return sum(part.tokens for part in self.parts)

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(part.longest for part in self.parts)

    @property
    def lengths(self) -> tuple[LengthBucket, ...]:
        """Documents and tokens by power of two, over all sources."""
        return merge_buckets([part.lengths for part in self.parts])

    @property
    def sha256(self) -> str:
        """Identity of the tokens: the hash of the token file, or of all in order."""
        sums = [file.sha256 for part in self.parts for file in part.bins]
        return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()


def merge_buckets(parts: Iterable[Iterable[LengthBucket]]) -> tuple[LengthBucket, ...]:
    """Return the buckets of several groups of documents as those of all of them."""
    documents: dict[int, int] = defaultdict(int)
    tokens: dict[int, int] = defaultdict(int)
    for part in parts:
        for bucket in part:
            documents[bucket.at_least] += bucket.documents
            tokens[bucket.at_least] += bucket.tokens
    return tuple(
        LengthBucket(at_least=bound, documents=documents[bound], tokens=tokens[bound])
        for bound in sorted(documents)
    )
