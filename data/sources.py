# SPDX-License-Identifier: Apache-2.0
"""Read documents from any source: those of `data.readers`, and sources that are made here.

    synthetic:KIND[,name=value...]   long-range documents (`data.long_range.spec`)
    repositories:PATH                each repository in a folder as one document
                                     (`data.repositories`)

A source that is made here has its documents by number (`numbered`), so that workers can divide
them. All others are read in order.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

from data import readers
from data.long_range.documents import SyntheticSource
from data.long_range.spec import PREFIX as SYNTHETIC
from data.long_range.spec import Spec
from data.readers import Document, SourceError
from data.repositories.source import PREFIX as REPOSITORIES
from data.repositories.source import RepositoriesSource

Kind = Literal["documents", "synthetic", "repositories"]


class NumberedSource(Protocol):
    """Documents by number: the same text for the same number, in any process."""

    @property
    def kind(self) -> str:
        """Return the word that labels the source in a manifest."""

    @property
    def origin(self) -> str:
        """Return the source's name with all values that the documents depend on."""

    def __len__(self) -> int:
        """Return the number of documents."""

    def document(self, number: int, skipped: Counter[str]) -> Document:
        """Return a document; `skipped` receives what was left out of it, by reason."""

    def size(self, number: int) -> int:
        """Return the estimated bytes of a document."""


def kind_of(source: str | None) -> Kind:
    """Return the word that labels a source in a manifest."""
    if source is not None and source.startswith(SYNTHETIC):
        return "synthetic"
    if source is not None and source.startswith(REPOSITORIES):
        return "repositories"
    return "documents"


def numbered(source: str, count: Callable[[str], int] | None = None) -> NumberedSource:
    """Return a source whose `kind_of` is not "documents"; raise ValueError for one not valid.

    Args:
        count: tokens of a text; a synthetic source needs it for its documents.
    """
    if kind_of(source) == "synthetic":
        return synthetic(source, count)
    return RepositoriesSource(source)


def synthetic(source: str, count: Callable[[str], int] | None = None) -> SyntheticSource:
    """Return a source whose `kind_of` is "synthetic", with its filler read; see `numbered`."""
    return SyntheticSource(source, count, lambda name: (text for text, _ in documents(name)))


def absolute(source: str) -> str:
    """Return a source that is made here with absolute paths, for a job with another folder.

    Raises ValueError for a source that is not valid.
    """
    if kind_of(source) == "synthetic":
        spec = Spec.parse(source)
        if not spec.filler or spec.filler.startswith(readers.HUB_PREFIX):
            return str(spec)
        if kind_of(spec.filler) != "documents":
            return str(replace(spec, filler=absolute(spec.filler)))
        path = Path(spec.filler).resolve()
        if not path.exists():
            raise SourceError(f"the filler {spec.filler} of {source} is not there ({path})")
        return str(replace(spec, filler=str(path)))
    RepositoriesSource(source)
    return REPOSITORIES + str(Path(source.removeprefix(REPOSITORIES)).resolve())


def path_of(source: str) -> str | None:
    """Return the file or folder that a source reads; None for the hub and made-up sentences."""
    if kind_of(source) == "synthetic":
        filler = Spec.parse(source).filler
        return path_of(filler) if filler else None
    if source.startswith(readers.HUB_PREFIX):
        return None
    return source.removeprefix(REPOSITORIES)


def documents(
    source: str | None,
    *,
    text_key: str = "text",
    skip_broken: bool = False,
    skipped: Counter[str] | None = None,
    count: Callable[[str], int] | None = None,
) -> Iterator[Document]:
    """Yield every document of a source in an order that does not change from call to call.

    The arguments are those of `data.readers.documents`, and `count` that of `numbered`.
    """
    if source is None or kind_of(source) == "documents":
        yield from readers.documents(
            source, text_key=text_key, skip_broken=skip_broken, skipped=skipped
        )
        return
    found = numbered(source, count)
    counts = Counter[str]() if skipped is None else skipped
    made = 0
    for number in range(len(found)):
        document = found.document(number, counts)
        if document.text:
            made += 1
            yield document
        else:
            counts["empty"] += 1
    if not made:
        raise SourceError(f"the source {source} holds no document with text; choose another folder")
