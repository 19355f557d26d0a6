# SPDX-License-Identifier: Apache-2.0
"""Check that the files of a store are as they were written; standard library only.

The manifest has the sums of the index files, which are read whole each time: some bytes a document.
Token files may have terabytes, so there is also a sum for each block:

    STORE/blocks.json     SHA-256 of every 64 MiB of the token files

The manifest lists it like any other file. A sample of blocks, drawn anew each time and always with
the first and the last, detects truncation, zeroed regions and exchanged files; a flipped bit
anywhere is detected by reading everything, in threads.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from data.files.sha256 import Hashing, Part
from data.splits import StoredFile
from data.store import SPLITS, Manifest, SplitName, StoreError, require_own_tokenizer

BLOCKS = "blocks.json"
BLOCK = 64 * 2**20
"""Bytes of a block."""
DRAWN = 4
"""Blocks that a sample reads of the token files of an index, with the first and the last."""


def write_blocks(folder: Path, names: Sequence[str]) -> StoredFile:
    """Write the sums of the blocks of token files in a folder; return the file they are in.

    A file that several names link to is read once.
    """
    files = {name: (folder / name).resolve() for name in names}
    parts = {file: _parts(file, file.stat().st_size) for file in files.values()}
    with Hashing([part for of_file in parts.values() for part in of_file]) as hashing:
        sums = map(_required, hashing.results())
        of_files = {file: [next(sums) for _ in of_file] for file, of_file in parts.items()}
    by_file = {name: of_files[file] for name, file in files.items()}
    content = {"block_bytes": BLOCK, "sha256": by_file}
    (folder / BLOCKS).write_text(json.dumps(content) + "\n", encoding="utf-8")
    return StoredFile.of(folder, BLOCKS)


def verify(manifest: Manifest, *, whole: bool = False, splits: Sequence[SplitName] = SPLITS) -> int:
    """Verify the files of splits and the tokenizer by their sums; return bytes read.

    Index files are read whole; of token files a sample of blocks, or all with `whole`. An older
    store has no sums of blocks: its token files are read only if a sample would cover them.

    Raises:
        StoreError: for the first file that is damaged, or that cannot be read.
    """
    require_own_tokenizer(manifest)
    for file in manifest.tokenizer_files:
        _require_undamaged(manifest.root, file)
    expected: list[tuple[Part, int, str]] = []
    blocks = _blocks(manifest)
    for pair in [part for name in splits for part in manifest.split(name).parts]:
        for file in (*pair.bins, pair.idx):
            _require_size(manifest.root / file.path, file.bytes)
        expected.append((Part(manifest.root / pair.idx.path), pair.idx.bytes, pair.idx.sha256))
        expected += _of_tokens(manifest.root, pair.bins, blocks, whole)
    with Hashing([part for part, _, _ in expected]) as hashing:
        for (part, _, sha256), result in zip(expected, hashing.results(), strict=True):
            if result != sha256:
                raise StoreError(_damaged(part, result))
    return sum(size for _, size, _ in expected)


def is_sampled(manifest: Manifest, *, splits: Sequence[SplitName] = SPLITS) -> bool:
    """Whether `verify` of these splits reads something of every token file without `whole`."""
    return manifest.blocks is not None or all(
        _bytes(part.bins) <= _sample_bytes()
        for name in splits
        for part in manifest.split(name).parts
    )


def _blocks(manifest: Manifest) -> dict[str, list[str]]:
    """Return the sums of the blocks by token file; raise StoreError if their file is damaged."""
    if manifest.blocks is None:
        return {}
    path = manifest.root / manifest.blocks.path
    _require_undamaged(manifest.root, manifest.blocks)
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["block_bytes"] != BLOCK:
        raise StoreError(
            f"{path} has blocks of {content['block_bytes']} bytes, this program reads blocks of "
            f"{BLOCK}; prepare the store again"
        )
    return dict(content["sha256"])


def _of_tokens(
    root: Path, files: Sequence[StoredFile], blocks: dict[str, list[str]], whole: bool
) -> Iterator[tuple[Part, int, str]]:
    """Yield what to read of the token files of an index, each with its bytes and its sum."""
    if any(file.path not in blocks for file in files):
        if whole or _bytes(files) <= _sample_bytes():
            for file in files:
                yield Part(root / file.path), file.bytes, file.sha256
        return
    listed: list[tuple[Part, str]] = []
    for file in files:
        parts, sums = _parts(root / file.path, file.bytes), blocks[file.path]
        if len(parts) != len(sums):
            raise StoreError(
                f"{root / BLOCKS} has the sums of {len(sums):,} blocks of {file.path}, which has "
                f"{len(parts):,}; prepare the store again"
            )
        listed += zip(parts, sums, strict=True)
    if not whole and len(listed) > DRAWN + 2:
        drawn = random.SystemRandom().sample(range(1, len(listed) - 1), DRAWN)
        listed = [listed[at] for at in (0, *sorted(drawn), len(listed) - 1)]
    for part, sha256 in listed:
        assert part.stop is not None
        yield part, part.stop - part.start, sha256


def _sample_bytes() -> int:
    return (DRAWN + 2) * BLOCK


def _bytes(files: Sequence[StoredFile]) -> int:
    return sum(file.bytes for file in files)


def _parts(path: Path, size: int) -> list[Part]:
    return [Part(path, start, min(start + BLOCK, size)) for start in range(0, size, BLOCK)]


def _require_size(path: Path, size: int) -> None:
    """Raise StoreError for a file that was removed or resized since the store was opened."""
    try:
        found = path.stat().st_size
    except OSError as error:
        raise StoreError(_unreadable(path, error)) from error
    if found != size:
        raise StoreError(
            f"{path} has {found:,} bytes where {size:,} were written; restore it from a copy, or "
            "prepare the store again"
        )


def _require_undamaged(root: Path, file: StoredFile) -> None:
    """Raise StoreError for a small file that differs from the saved one."""
    part = Part(root / file.path)
    with Hashing([part]) as hashing:
        (result,) = hashing.results()
    if result != file.sha256:
        raise StoreError(_damaged(part, result))


def _required(result: str | OSError) -> str:
    if isinstance(result, OSError):
        raise result
    return result


def _damaged(part: Part, result: str | OSError) -> str:
    if isinstance(result, OSError):
        return _unreadable(part.path, result)
    where = f" of bytes {part.start:,} to {part.stop:,}" if part.stop is not None else ""
    return (
        f"{part.path} is damaged: its SHA-256{where} differs from what was written; restore it "
        "from a copy or prepare the store again, or use it as it is with --no-verify"
    )


def _unreadable(path: Path, error: OSError) -> str:
    return (
        f"{path} cannot be read ({error.strerror}); restore it from a copy, or prepare the store "
        "again"
    )
