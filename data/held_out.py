# SPDX-License-Identifier: Apache-2.0
"""Read whole documents back from a store, for evaluation at lengths training did not choose."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.store import Manifest, SplitName, StoreError

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_TOKEN_TYPES: dict[int, np.dtype[Any]] = {4: np.dtype(np.int32), 8: np.dtype(np.uint16)}
"""The two of Megatron's type codes that stores use."""


def long_documents(
    store: Manifest | Path | str, *, min_tokens: int, split: SplitName = "heldout"
) -> Iterator[NDArray[np.int64]]:
    """Yield the documents of a split that have at least `min_tokens` tokens, eod included."""
    manifest = store if isinstance(store, Manifest) else Manifest.load(store)
    prefix = manifest.split_prefix(split)
    token_type, lengths = _index(prefix.with_name(prefix.name + ".idx"))
    tokens = np.memmap(prefix.with_name(prefix.name + ".bin"), dtype=token_type, mode="r")
    ends = np.cumsum(lengths)
    for document in np.flatnonzero(lengths >= min_tokens):
        end = ends[document]
        yield tokens[end - lengths[document] : end].astype(np.int64)


def _index(path: Path) -> tuple[np.dtype[Any], NDArray[np.int64]]:
    """Return the token type and the documents' lengths of a Megatron index.

    The file is: header, `_HEADER` (magic, version, type code, sequences, documents + 1), then
    the sequences' lengths (int32), then fields not needed if a document is one sequence.
    """
    with path.open("rb") as file:
        magic, version, code, sequences, boundaries = _HEADER.unpack(file.read(_HEADER.size))
        if magic != _MAGIC or version != 1 or code not in _TOKEN_TYPES:
            raise StoreError(f"{path} is not the index of a token store")
        if boundaries != sequences + 1:
            raise StoreError(
                f"{path} has documents of several sequences; in a store a document is one"
            )
        lengths = np.fromfile(file, dtype=np.int32, count=sequences)
    return _TOKEN_TYPES[code], lengths.astype(np.int64)
