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
    from data.token_files.stored_documents import StoredDocuments, require_whole  # imports torch

    manifest = store if isinstance(store, Manifest) else Manifest.load(store)
    for prefix in manifest.prefixes(split):
        require_whole(prefix)
        documents = StoredDocuments(str(prefix))
        lengths = documents.sequence_lengths
        most = lengths.max(initial=0) if max_tokens is None else max_tokens
        for number in np.flatnonzero((lengths >= min_tokens) & (lengths <= most)):
            yield documents[int(number)].astype(np.int64)
