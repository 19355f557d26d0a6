# SPDX-License-Identifier: Apache-2.0
"""Read whole documents back from a store, for evaluation at lengths training did not choose."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.store import Manifest, SplitName, StoreError


def long_documents(
    store: Manifest | Path | str, *, min_tokens: int, split: SplitName = "heldout"
) -> Iterator[NDArray[np.int64]]:
    """Yield the documents of a split that have at least `min_tokens` tokens, eod included.

    Raises StoreError for a split that the store does not have, and for a file that is not one of
    Megatron's indexes or has documents of several sequences.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset  # here: it imports torch

    manifest = store if isinstance(store, Manifest) else Manifest.load(store)
    prefix = manifest.split_prefix(split)
    try:
        documents = IndexedDataset(str(prefix))
    except (AssertionError, OSError, ValueError) as error:
        raise StoreError(f"{prefix}.idx is not the index of a token store ({error})") from None
    lengths = documents.sequence_lengths
    if len(documents.document_indices) != len(lengths) + 1:
        raise StoreError(f"{prefix}.idx has documents of several sequences; a store has none")
    for number in np.flatnonzero(lengths >= min_tokens):
        yield documents[int(number)].astype(np.int64)
