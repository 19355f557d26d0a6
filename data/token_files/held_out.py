# SPDX-License-Identifier: Apache-2.0
"""Read whole documents back from a store, for evaluation at lengths training did not choose."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.store import Manifest, SplitName


def long_documents(
    store: Manifest | Path | str,
    *,
    min_tokens: int,
    max_tokens: int | None = None,
    split: SplitName = "heldout",
) -> Iterator[NDArray[np.int64]]:
    """Yield the documents of a split that have at least `min_tokens` tokens, eod included.

    With `max_tokens`, longer documents are left out.

    Raises StoreError for a split that the store does not have, and for a file that is not one of
    Megatron's indexes or has documents of several sequences.
    """
    manifest = store if isinstance(store, Manifest) else Manifest.load(store)
    for prefix in manifest.prefixes(split):
        yield from _of_files(prefix, min_tokens, max_tokens)


def with_first(
    document: NDArray[np.int64], start: int, length: int, first: int
) -> NDArray[np.int64]:
    """Return `length` tokens of a document: its `first` ones, then those after `start` more."""
    return np.concatenate((document[:first], document[first + start : start + length]))


def documents_in_turn(
    manifest: Manifest,
    *,
    min_tokens: int,
    max_tokens: int | None = None,
    split: SplitName = "heldout",
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yield the documents of `long_documents`, one of each source in turn, and their sources."""
    parts = zip(manifest.split(split).parts, manifest.prefixes(split), strict=True)
    left = {part.source: _of_files(prefix, min_tokens, max_tokens) for part, prefix in parts}
    while left:
        for source, documents in list(left.items()):
            document = next(documents, None)
            if document is None:
                del left[source]
            else:
                yield source, document


def _of_files(
    prefix: Path, min_tokens: int, max_tokens: int | None = None
) -> Iterator[NDArray[np.int64]]:
    from data.token_files.stored_documents import StoredDocuments, require_whole  # imports torch

    require_whole(prefix)
    documents = StoredDocuments(str(prefix))
    lengths = documents.sequence_lengths
    most = lengths.max(initial=0) if max_tokens is None else max_tokens
    for number in np.flatnonzero((lengths >= min_tokens) & (lengths <= most)):
        yield documents[int(number)].astype(np.int64)
