# SPDX-License-Identifier: Apache-2.0
"""Megatron's reader of documents, for indexes whose tokens are in several files as well."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset, _BinReader, _IndexReader

from data.store import StoreError
from data.token_files.tokens import JoinedTokens, Tokens, TokenType, token_files

AT_ONCE = 2**20
"""Documents whose places are checked at once."""


class StoredDocuments(IndexedDataset):
    """The documents of an index of a store."""

    def initialize(
        self, path_prefix: str, multimodal: bool, mmap: bool, object_storage_config: Any
    ) -> None:
        """Open the files of a prefix; Megatron calls this when it unpickles a dataset, too."""
        data = Path(f"{path_prefix}.bin")
        if not data.is_dir():
            super().initialize(path_prefix, multimodal, mmap, object_storage_config)
            return
        self.path_prefix, self.multimodal = path_prefix, multimodal
        self.mmap, self.object_storage_config = mmap, object_storage_config
        self.index = _IndexReader(f"{path_prefix}.idx", multimodal)
        self.bin_reader = _JoinedReader(data, np.dtype(self.index.dtype))


class _JoinedReader(_BinReader):
    """Megatron's reader of bytes, over the files of a folder."""

    def __init__(self, folder: Path, dtype: TokenType) -> None:
        self._tokens = JoinedTokens(token_files(folder), dtype)
        self._width = dtype.itemsize

    def read(self, dtype: Any, count: int, offset: int) -> Tokens:
        """Return a copy of `count` tokens from the byte `offset` on, in the type of the index.

        Megatron-Core holds the documents of a sample at a time; each would keep its file open.
        """
        first = int(offset) // self._width
        return self._tokens[first : first + int(count)].copy()


def require_whole(prefix: Path) -> None:
    """Raise StoreError for an index or data that is missing, truncated or of another format.

    `IndexedDataset` itself prints a traceback while it is deleted after it failed to open.
    """
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
    found = sum(file.stat().st_size for file in token_files(data)) if data.exists() else 0
    if found < size:
        raise StoreError(f"{data} has {found:,} bytes and its index describes {size:,}; {again}")
