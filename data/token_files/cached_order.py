# SPDX-License-Identifier: Apache-2.0
"""Checksums of the order of samples that Megatron keeps in a store.

    STORE/index/HASH-NumberedDataset-train-document_index.npy    and sample_index, shuffle_index
    STORE/index/HASH-NumberedDataset-train-description.txt
    STORE/index/HASH-NumberedDataset-train-sums.json             SHA-256 of the others

Megatron-Core 0.15.3 builds these files at the first start and later reads them as long as all are
there. It writes them in their place, so a kill leaves half a file, and reads them by `numpy.load`
with pickles allowed. A flipped bit would exchange samples without a word. Here they are read only
if they have the checksums that they were written with; otherwise they are removed, and Megatron
builds the same again.
"""

import json
import logging
from contextlib import suppress
from pathlib import Path

from data.files.sha256 import sha256_of
from data.files.whole import write_text

LOG = logging.getLogger("custom_modules.data")
"""Child of the logger whose messages the first rank of a training shows."""
FILES = ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy")
SUMS = "sums.json"


def discard_damaged(folder: Path, name: str) -> str:
    """Remove the files of an order unless they are as they were written; return what is wrong."""
    paths, sums = [folder / f"{name}-{file}" for file in FILES], folder / f"{name}-{SUMS}"
    if not any(path.exists() for path in (*paths, sums)):
        return ""
    why = _damage(paths, sums)
    if why:
        LOG.warning("%s; the order of samples is built again", why)
        for path in (sums, *paths):
            with suppress(FileNotFoundError):
                path.unlink()
    return why


def _damage(paths: list[Path], sums: Path) -> str:
    try:
        written = json.loads(sums.read_text(encoding="utf-8"))
        found = _sums(paths)
    except FileNotFoundError as error:
        return f"{error.filename} is missing: its writing was interrupted, or it is older than sums"
    except (OSError, ValueError) as error:
        return f"{sums} cannot be read ({error})"
    for path, (file, sha256) in zip(paths, found.items(), strict=True):
        if not isinstance(written, dict) or written.get(file) != sha256:
            return f"{path} is damaged: its SHA-256 differs from that in {sums.name}"
    return ""


def write_sums(folder: Path, name: str) -> None:
    """Write the checksums of an order that has just been built, if they are not there."""
    sums = folder / f"{name}-{SUMS}"
    if not sums.exists():
        write_text(sums, json.dumps(_sums([folder / f"{name}-{file}" for file in FILES])) + "\n")


def _sums(paths: list[Path]) -> dict[str, str]:
    return dict(zip(FILES, sha256_of(paths), strict=True))
