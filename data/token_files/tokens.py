# SPDX-License-Identifier: Apache-2.0
"""The tokens of one or several files as one array that is mapped into memory.

    PREFIX.bin                        a token file, or
    PREFIX.bin/00000.bin, 00001.bin   a folder of token files, in the order of their names

With a folder, an index counts bytes from the start of the first file on through all of them, as if
they were one file. A document lies in one file.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.integer[Any]]
"""Token ids, of any type of whole number."""
TokenType = np.dtype[np.integer[Any]]

MAPPED = 256
"""Files of folders that a process maps at once: each takes a file descriptor, of which many systems
allow 1,024."""


def token_files(path: Path) -> list[Path]:
    """Return the token files of a path that ends in `.bin`, in the order in which they are read."""
    return sorted(path.glob("*.bin")) if path.is_dir() else [path]


class JoinedTokens:
    """The tokens of several files; slices have no step, and no bound counts from the end."""

    def __init__(self, files: Sequence[Path], dtype: TokenType) -> None:
        """Measure the files; none is opened before it is read."""
        sizes = [path.stat().st_size // dtype.itemsize for path in files]
        self._files = [
            _File(path, dtype, size) for path, size in zip(files, sizes, strict=True) if size
        ]
        self._ends = list(accumulate(file.tokens for file in self._files))
        self._dtype = dtype

    def __len__(self) -> int:
        """Return the tokens of all files."""
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, place: slice) -> Tokens:
        """Return tokens; of one file without a copy."""
        first, stop = int(place.start or 0), len(self) if place.stop is None else int(place.stop)
        stop = min(stop, len(self))
        if stop <= first:
            return np.empty(0, self._dtype)
        number = bisect_right(self._ends, first)
        begin = self._ends[number] - self._files[number].tokens
        if stop <= self._ends[number]:
            return _mapped(self._files[number])[first - begin : stop - begin]
        joined = np.empty(stop - first, self._dtype)  # pieces would keep all their files open
        done = first
        while done < stop:
            begin = self._ends[number] - self._files[number].tokens
            until = min(stop, self._ends[number])
            piece = _mapped(self._files[number])[done - begin : until - begin]
            joined[done - first : until - first] = piece
            done, number = until, number + 1
        return joined


TokenArray = Tokens | JoinedTokens


def mapped(path: Path, dtype: TokenType) -> TokenArray:
    """Return the tokens of a file, or of the files of a folder."""
    if path.is_dir():
        return JoinedTokens(token_files(path), dtype)
    return np.memmap(path, dtype=dtype, mode="r")


@dataclass(frozen=True, eq=False, slots=True)
class _File:
    """A file of a folder; compared by identity, so that a later store at its path is not it."""

    path: Path
    dtype: TokenType
    tokens: int


@lru_cache(maxsize=MAPPED)
def _mapped(file: _File) -> Tokens:
    return np.asarray(np.memmap(file.path, dtype=file.dtype, mode="r", shape=(file.tokens,)))
