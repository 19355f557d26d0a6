# SPDX-License-Identifier: Apache-2.0
"""The token files of all shards, in the order of the plan, to the files of the store.

Token files are copied by the kernel (`copy_file_range`), and lengths pass to the index through an
array of a fixed size: nothing is held for each document.
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.files.sha256 import Hashing
from data.files.sha256 import Part as FilePart
from data.files.writable import require_folder
from data.formats.records import SourceError
from data.preparation.plan import PlannedSource
from data.preparation.skip_limit import require_few_broken
from data.preparation.token_files import COPIED, LENGTH_TYPE
from data.preparation.work import Receipt, Work
from data.readers import without_documents
from data.splits import Part, SourceFacts, Split, StoredFile
from data.store import (
    ONLY_SOURCE,
    SPLITS,
    TOKENIZER,
    Manifest,
    SplitName,
    StoreError,
    TokenizerFacts,
)
from data.token_files.length_counts import LengthCounts
from data.token_files.megatron_index import INDEX_BYTES, IndexWriter
from data.token_files.verification import write_blocks

HELD = 2**20
"""Documents whose lengths are in memory at a time."""
VERIFIED = 256
"""Shards whose files are hashed together."""


class UnfinishedError(StoreError):
    """Shards whose task has not been done, or whose files are damaged."""

    def __init__(self, work: Work, numbers: Sequence[int]) -> None:
        listed = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
        super().__init__(
            f"{len(numbers):,} of {work.count:,} parts in {work.folder} are missing or damaged "
            f"({listed}); do one with longhaul prepare --plan {work.folder} --task {numbers[0]}"
        )
        self.numbers = list(numbers)


def merge(work: Work) -> Manifest:
    """Write the store into its folder in the work folder; return its manifest.

    Raises UnfinishedError for missing or damaged parts, whose receipts are removed, and SourceError
    for a source without documents, an empty split, or too many broken records.
    """
    receipts = _receipts(work)
    _require_documents(work, receipts)
    require_few_broken(work.facts, receipts)
    _require_undamaged(work, receipts)
    shutil.rmtree(work.store, ignore_errors=True)
    _require_room(work, receipts)
    work.store.mkdir()
    shutil.copytree(work.tokenizer, work.store / TOKENIZER)
    splits = {split: Split(parts=tuple(_parts(work, receipts, split))) for split in SPLITS}
    names = [file.path for split in SPLITS for part in splits[split].parts for file in part.bins]
    manifest = Manifest(
        root=work.store,
        sources=tuple(_source(work, receipts, source) for source in work.plan.sources),
        heldout_fraction=work.settings.heldout_fraction,
        seed=work.settings.seed,
        tokenizer=TokenizerFacts(**work.facts["tokenizer_facts"]),
        train=splits["train"],
        heldout=splits["heldout"],
        skipped=dict(skipped_of(work, receipts)),
        blocks=write_blocks(work.store, names),
        versions=work.facts["versions"],
    )
    manifest.write()
    return manifest


def skipped_of(work: Work, receipts: Iterable[Receipt]) -> Counter[str]:
    """Return the skipped records and files of the whole store, by reason."""
    counts = Counter[str]()
    for skipped in (
        *(source.skipped for source in work.plan.sources),
        *(receipt.skipped for receipt in receipts),
    ):
        counts.update(skipped)
    return counts


def _receipts(work: Work) -> list[Receipt]:
    found = [work.receipt(number) for number in range(work.count)]
    missing = [number for number, receipt in enumerate(found) if receipt is None]
    if missing:
        raise UnfinishedError(work, missing)
    return [receipt for receipt in found if receipt is not None]


def _require_documents(work: Work, receipts: Sequence[Receipt]) -> None:
    counts: Counter[str] = Counter()
    for source in work.plan.sources:
        own = [receipts[number] for number in _numbers(work, source.name)]
        if not sum(receipt.documents for receipt in own):
            skipped = Counter(source.skipped)
            for receipt in own:
                skipped.update(receipt.skipped)
            raise without_documents(source.origin, skipped)
        for receipt in own:
            counts.update({split: receipt.splits[split].documents for split in SPLITS})
    named = " and ".join(source.origin for source in work.plan.sources)
    require_both_splits(named, work.settings.heldout_fraction, counts)


def require_both_splits(named: str, fraction: float, documents: Counter[str]) -> None:
    """Raise SourceError if one of the splits of a store would have no document."""
    for split in SPLITS:
        if not documents[split]:
            raise SourceError(
                f"the {split} split of {named} is empty: the source has"
                f" {documents.total():,} documents and the held-out fraction is"
                f" {fraction}; choose another fraction or give more documents"
            )


def _require_undamaged(work: Work, receipts: Sequence[Receipt]) -> None:
    """Raise UnfinishedError for parts whose SHA-256 is not that of their receipt."""
    damaged = []
    for first in range(0, len(receipts), VERIFIED):
        expected: list[tuple[int, Path, str]] = []
        for number in range(first, min(first + VERIFIED, len(receipts))):
            for split in SPLITS:
                facts = receipts[number].splits[split]
                for ending, sha256 in (
                    (".bin", facts.bin_sha256),
                    (".lengths", facts.lengths_sha256),
                ):
                    expected.append((number, _file(work, number, split, ending), sha256))
        with Hashing([FilePart(path) for _, path, _ in expected]) as hashing:
            for (number, _, sha256), result in zip(expected, hashing.results(), strict=True):
                if result != sha256:
                    damaged.append(number)
    if damaged:
        numbers = sorted(set(damaged))
        for number in numbers:
            work.forget(number)
        raise UnfinishedError(work, numbers)


def _require_room(work: Work, receipts: Iterable[Receipt]) -> None:
    """Raise ValueError if the store, of which the parts are a copy, has no room next to them."""
    splits = [facts for receipt in receipts for facts in receipt.splits.values()]
    room = sum(facts.bin_bytes + INDEX_BYTES * facts.documents for facts in splits)
    require_folder(work.folder, "the store in", room, "its parts are removed once it is complete")


def _parts(work: Work, receipts: Sequence[Receipt], split: SplitName) -> Iterator[Part]:
    """Yield the parts of a split; a source without documents in it has none."""
    only = [source.name for source in work.plan.sources] == [ONLY_SOURCE]
    for source in work.plan.sources:
        numbers = _numbers(work, source.name)
        facts = [receipts[number].splits[split] for number in numbers]
        documents = sum(fact.documents for fact in facts)
        if not documents:
            continue
        name = split if only else f"{split}-{source.name}"
        _concatenate(
            [_file(work, number, split, ".bin") for number in numbers], work.store / f"{name}.bin"
        )
        lengths = _write_index(
            [_file(work, number, split, ".lengths") for number in numbers],
            documents,
            np.dtype(work.encoder.token_type),
            work.store / f"{name}.idx",
        )
        yield Part(
            source=source.name,
            documents=documents,
            tokens=sum(fact.tokens for fact in facts),
            longest=lengths.longest,
            lengths=lengths.buckets(),
            bins=(StoredFile.of(work.store, f"{name}.bin"),),
            idx=StoredFile.of(work.store, f"{name}.idx"),
        )


def _numbers(work: Work, source: str) -> list[int]:
    return [number for number, shard in enumerate(work.plan.shards) if shard.source == source]


def _file(work: Work, number: int, split: SplitName, ending: str) -> Path:
    prefix = work.split_prefix(number, split)
    return prefix.with_name(prefix.name + ending)


def _concatenate(paths: Sequence[Path], to: Path) -> None:
    with to.open("wb", buffering=0) as target:
        for path in paths:
            with path.open("rb", buffering=0) as source:
                _append(source, target, path.stat().st_size)


def _append(source: Any, target: Any, left: int) -> None:
    """Append a file to another, in the kernel where the file systems can."""
    with suppress(OSError):  # between some file systems; a full disk fails below as well
        while left:
            copied = os.copy_file_range(source.fileno(), target.fileno(), left)
            if not copied:
                break
            left -= copied
    while left:
        block = source.read(min(left, COPIED))
        if not block:
            raise StoreError(
                f"the part {source.name} ended {left:,} bytes early: it was cut after it had been "
                "checked; prepare the store again, and let nothing else write in its folder"
            )
        written = 0
        while written < len(block):
            written += target.write(block[written:])
        left -= len(block)


def _write_index(paths: Sequence[Path], documents: int, tokens: Any, to: Path) -> LengthCounts:
    """Write Megatron's index of documents in order; return their lengths by power of two."""
    counts, byte = LengthCounts(), 0
    with IndexWriter(to, tokens, documents) as index:
        for chunk in _lengths(paths):
            ends = byte + np.cumsum(chunk, dtype=np.int64) * tokens.itemsize
            index.add(chunk, np.append(byte, ends[:-1]))
            counts.add(chunk)
            byte = int(ends[-1])
    return counts


def _lengths(paths: Sequence[Path]) -> Iterator[NDArray[np.int32]]:
    for path in paths:
        with path.open("rb") as file:
            while (chunk := np.fromfile(file, LENGTH_TYPE, HELD)).size:
                yield chunk


def _source(work: Work, receipts: Sequence[Receipt], source: PlannedSource) -> SourceFacts:
    return SourceFacts(
        name=source.name,
        kind=source.kind,
        origin=source.origin,
        sha256=_files_sha256(work, receipts, source.name),
    )


def _files_sha256(work: Work, receipts: Sequence[Receipt], source: str) -> str | None:
    """Return the SHA-256 of the sorted list of files, None if one was not hashed."""
    numbers = _numbers(work, source)
    pieces = [piece for number in numbers for piece in work.plan.shards[number].pieces]
    sizes = {piece.path: piece.size for piece in pieces if piece.is_of_file}
    sums = {path: sha256 for number in numbers for path, sha256 in receipts[number].files.items()}
    if not sizes or any(sums.get(path) is None for path in sizes):
        return None
    top = os.path.commonpath([os.path.dirname(path) for path in sizes])
    listed = sorted([os.path.relpath(path, top), size, sums[path]] for path, size in sizes.items())
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()
