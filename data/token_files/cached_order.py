# SPDX-License-Identifier: Apache-2.0
"""The order of samples that is kept in a store, read without pickles and by its checksums.

    STORE/index/HASH-NumberedDataset-train-document_index.npy    and sample_index, shuffle_index
    STORE/index/HASH-NumberedDataset-train-description.txt
    STORE/index/HASH-NumberedDataset-train-sums.json             SHA-256 of the others

Names and arrays are those of Megatron-Core 0.15.3. It would read the arrays by `numpy.load` with
pickles allowed, which run what code a file has, and the sums do not prevent it: whoever can write
the files can write their sums. So Megatron only builds an order, in memory; reading and writing are
done here. An array is mapped if its header says that it holds numbers, and used if all files have
the sums that they were written with. A flipped bit would exchange samples without a word.

An order follows from its hash, so any process may build it, and all build the same. One that is not
there, or damaged, is built by the first rank, written into a hidden folder and moved into place
file by file, the sums last. No file is ever removed or half written: runs that start at once on a
new store need no lock, and replace files by the same ones. Other ranks read what the first has
written; a rank that cannot, on a copy of the store of its own or where nothing can be written,
builds the order for itself.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from data.files.json_object import json_object
from data.files.sha256 import sha256_of
from data.files.whole import folder_beside
from data.store import StoreError

LOG = logging.getLogger("custom_modules.data")
"""Child of the logger whose messages the first rank of a training shows."""
DESCRIPTION = "description.txt"
ARRAYS = {"document_index.npy": 1, "sample_index.npy": 2, "shuffle_index.npy": 1}
"""The arrays of an order, and the dimensions of each."""
FILES = (DESCRIPTION, *ARRAYS)
SUMS = "sums.json"

NOT_SAVED = "because path_to_cache is None"
"""In Megatron's warnings that it keeps no order, which is kept here, and no blend."""
OF_MEGATRON = ("gpt_dataset", "blended_dataset")

Order = tuple[NDArray[np.integer[Any]], ...]
"""Documents [n], the document and the offset where each sample begins [samples + 1, 2], and samples
[samples] as they are drawn."""


def read_or_build(
    folder: Path, name: str, description: str, build: Callable[[], Order], *, writes: bool
) -> Order:
    """Return the order of a name from a folder, or what `build` returns where it cannot be read.

    With `writes`, what was built is written, with the description of what it was built from. A
    folder that cannot be written is a warning.
    """
    try:
        order = read(folder, name)
    except StoreError as error:
        LOG.warning("%s; the order of samples is built again", error)
        order = None
    if order is not None:
        return order
    order = build()
    if writes:
        try:
            _write(folder, name, description, order)
        except OSError as error:
            LOG.warning(
                "%s cannot be written (%s), so each rank builds the order of samples in its memory "
                "at every start; one start with a writable store keeps it there",
                folder,
                error.strerror or error,
            )
    return order


def leave_out_warnings() -> None:
    """Leave out Megatron's warnings that it keeps nothing of what it builds."""
    for module in OF_MEGATRON:
        logging.getLogger(f"megatron.core.datasets.{module}").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return NOT_SAVED not in record.getMessage()


def read(folder: Path, name: str) -> Order | None:
    """Return an order as memory-mapped arrays, or None if the folder has none of its files.

    Raises StoreError if a file is missing, is not as it was written, or holds other than numbers.
    """
    paths, sums = [folder / f"{name}-{file}" for file in FILES], folder / f"{name}-{SUMS}"
    if not any(path.exists() for path in (*paths, sums)):
        return None
    for path in (sums, *paths):
        if not path.is_file():
            raise StoreError(
                f"{path} is missing: its writing was interrupted, or it is older than sums"
            )
    order = tuple(_mapped(path, ARRAYS[file]) for path, file in zip(paths[1:], ARRAYS, strict=True))
    written = json_object(sums)
    try:
        found = sha256_of(paths)
    except OSError as error:
        raise StoreError(f"the order of samples cannot be read ({error})") from error
    for path, file, sha256 in zip(paths, FILES, found, strict=True):
        if written.get(file) != sha256:
            raise StoreError(f"{path} is damaged: its SHA-256 differs from that in {sums.name}")
    return order


def _mapped(path: Path, dimensions: int) -> NDArray[np.integer[Any]]:
    """Map an array of integers; its header is read as literals, and no pickle follows it."""
    try:
        array = open_memmap(path, mode="r")
    except Exception as error:  # a header that was tampered with may fail in any way
        raise StoreError(f"{path} is damaged: it cannot be read as an array ({error})") from error
    if array.dtype.kind not in "iu" or array.ndim != dimensions:
        raise StoreError(
            f"{path} is damaged: it holds {array.dtype} of {array.ndim} dimensions instead of "
            f"integers of {dimensions}"
        )
    return array


def _write(folder: Path, name: str, description: str, order: Order) -> None:
    """Write an order and its sums; another process may do the same at the same time."""
    with folder_beside(folder / name) as hidden:
        paths = [hidden / file for file in FILES]
        paths[0].write_text(description, encoding="utf-8")
        for path, array in zip(paths[1:], order, strict=True):
            np.save(path, array, allow_pickle=False)
        sums = hidden / SUMS
        sums.write_text(json.dumps(dict(zip(FILES, sha256_of(paths), strict=True))) + "\n")
        for path in (*paths, sums):
            path.replace(folder / f"{name}-{path.name}")
