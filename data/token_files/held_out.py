# SPDX-License-Identifier: Apache-2.0
"""Read whole documents back from a store, for evaluation at lengths training did not choose."""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.store import Manifest, SplitName, StoreError

AT_ONCE = 2**20
"""Documents whose places are checked at once."""


def long_documents(
    store: Manifest | Path | str, *, min_tokens: int, split: SplitName = "heldout"
) -> Iterator[NDArray[np.int64]]:
    """Yield the documents of a split that have at least `min_tokens` tokens, eod included.

    Raises StoreError for a split that the store does not have, and for a file that is not one of
    Megatron's indexes or has documents of several sequences.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset  # here: it imports torch

    manifest = store if isinstance(store, Manifest) else Manifest.load(store)
    for prefix in manifest.prefixes(split):
        require_whole(prefix)
        documents = IndexedDataset(str(prefix))
        for number in np.flatnonzero(documents.sequence_lengths >= min_tokens):
            yield documents[int(number)].astype(np.int64)


def require_whole(prefix: Path) -> None:
    """Raise StoreError for an index or data that is missing, truncated or of another format.

    `IndexedDataset` itself prints a traceback while it is deleted after it failed to open.
    """
    from megatron.core.datasets.indexed_dataset import _IndexReader

    index, data = (Path(f"{prefix}{end}") for end in (".idx", ".bin"))
    again = "restore it, or prepare the store again"
    try:
        reader = _IndexReader(str(index), multimodal=False)
    except (AssertionError, IndexError, OSError, ValueError, struct.error) as error:
        raise StoreError(f"{index} is not the index of a token store ({error}); {again}") from None
    if len(reader.document_indices) != len(reader) + 1:
        raise StoreError(f"{index} has documents of several sequences; a store has none; {again}")
    size = 0
    for first in range(0, len(reader), AT_ONCE):
        part = slice(first, first + AT_ONCE)
        lengths = reader.sequence_lengths[part].astype(np.int64)
        ends = reader.sequence_pointers[part] + lengths * reader.dtype_size
        size = max(size, int(ends.max(initial=0)))
    found = data.stat().st_size if data.is_file() else 0
    if found < size:
        raise StoreError(f"{data} has {found:,} bytes and its index describes {size:,}; {again}")
