# SPDX-License-Identifier: Apache-2.0
"""Make a token store from a source: choose the held-out documents, tokenize, write, describe.

A document is held out if the hash of its text falls below the held-out fraction. The choice does
not depend on the order of the source or on other documents, and two copies of one text always
land in the same split.

The store is built in a hidden folder next to its destination and renamed when it is complete, so
the destination has a complete store or nothing, whenever the run ends. Only a store is ever
overwritten.
"""

import hashlib
import heapq
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.cuda_extension import during_import
from data.files.whole import folder_beside
from data.files.writable import require_folder
from data.progress import progress, quiet_imports, say
from data.readers import SourceError, documents, source_name, stored_bytes
from data.store import (
    SPLITS,
    TOKENIZER,
    Manifest,
    Split,
    SplitName,
    StoredFile,
    StoreError,
    TokenizerFacts,
    is_store,
    length_buckets,
)
from data.verification import write_blocks

if TYPE_CHECKING:
    from data.tokenizer import DocumentTokenizer

VOCAB_SIZE = 2_048
HELDOUT_FRACTION = 0.1
"""For the standard library it holds out some 30 documents of more than 8,192 tokens."""

TRAINING_SAMPLE_BYTES = 2**26
"""Text a tokenizer is trained on: the documents with the smallest hashes up to this many bytes."""

LEAST_SHARE = 0.25
"""Least size of a store as a share of its documents' bytes: 2 bytes for a token of 8."""

BATCH_CHARS = 2**21
"""Characters of documents tokenized together, between two updates of the progress."""


@dataclass(frozen=True, slots=True)
class _Input:
    source: str | None
    text_key: str
    skip_broken: bool
    fraction: float
    seed: int

    def read(self, skipped: Counter[str]) -> Iterator[tuple[SplitName, float, str]]:
        """Yield split, hash and text of every document."""
        for text, _ in documents(
            self.source,
            text_key=self.text_key,
            skip_broken=self.skip_broken,
            skipped=skipped,
        ):
            place = content_hash(text, self.seed)
            yield "heldout" if place < self.fraction else "train", place, text


def prepare(
    source: str | None,
    out: Path | str,
    *,
    tokenizer: str | None = None,
    vocab_size: int = VOCAB_SIZE,
    text_key: str = "text",
    heldout_fraction: float = HELDOUT_FRACTION,
    seed: int = 0,
    skip_broken: bool = False,
    overwrite: bool = False,
) -> Manifest:
    """Write the store of a source and return its manifest.

    Args:
        source: see `data.readers`.
        tokenizer: folder or name of a Hugging Face tokenizer; without it one is trained on the
            documents that are not held out.
        vocab_size: vocabulary of the tokenizer to train.
        seed: seed of the hash that chooses the held-out documents.

    Raises:
        ValueError: in one sentence, for a source, tokenizer or destination that cannot be used.
            Then nothing has been written or replaced.
    """
    if not 0 < heldout_fraction < 1:
        raise SourceError(
            f"the held-out fraction is {heldout_fraction}, not between 0 and 1; give one as 0.1"
        )
    place = Path(out).absolute()
    _require_free(place, overwrite)
    require_folder(place, "the store", room=LEAST_SHARE * stored_bytes(source))
    given = _Input(source, text_key, skip_broken, heldout_fraction, seed)
    chosen, total_bytes = _tokenizer(given, tokenizer, vocab_size)
    with folder_beside(place) as folder:
        manifest = _write(given, chosen, folder, total_bytes)
        _require_free(place, overwrite)
        _move(folder, place)
    return replace(manifest, root=place)


def content_hash(text: str, seed: int) -> float:
    """Return a number in [0, 1) that depends on the text and the seed alone."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def _require_free(place: Path, overwrite: bool) -> None:
    if not place.exists() and not place.is_symlink():
        return
    if not place.is_dir() or place.is_symlink():
        raise StoreError(f"{place} exists and is not a folder; choose another folder for the store")
    if not any(place.iterdir()):
        return
    if not is_store(place):
        raise StoreError(
            f"{place} exists and is not a store; only a store is ever overwritten, so"
            " name another folder"
        )
    if not overwrite:
        raise StoreError(f"{place} exists; `--overwrite` replaces it once the new store is whole")


def _tokenizer(
    given: _Input, name: str | None, vocab_size: int
) -> "tuple[DocumentTokenizer, int | None]":
    """Return the tokenizer and, if all documents were read to train it, their size.

    A source whose first document cannot be read is refused before a tokenizer is loaded.
    """
    from data.tokenizer import load, require_vocab_size, train

    if name is not None:
        next(given.read(Counter()))
        say(f"loading the tokenizer {name}")
        return load(name), None
    require_vocab_size(vocab_size)
    say(f"reading {source_name(given.source)} to train a tokenizer of {vocab_size:,} tokens")
    sample, total_bytes = _sample(given)
    return train(sample, vocab_size), total_bytes


def _sample(given: _Input) -> tuple[list[str], int]:
    """Return the training documents with the smallest hashes, and the size of all documents."""
    kept: list[tuple[float, str]] = []
    kept_bytes = total_bytes = 0
    counts: Counter[SplitName] = Counter()
    for split, place, text in given.read(Counter()):
        size = len(text.encode())
        total_bytes += size
        counts[split] += 1
        if split == "heldout":
            continue
        heapq.heappush(kept, (-place, text))
        kept_bytes += size
        while kept_bytes > TRAINING_SAMPLE_BYTES and len(kept) > 1:
            kept_bytes -= len(heapq.heappop(kept)[1].encode())
    _require_both_splits(given, counts)
    return [text for _, text in sorted(kept, reverse=True)], total_bytes


def _require_both_splits(given: _Input, documents_of: Counter[SplitName]) -> None:
    for split in SPLITS:
        if not documents_of[split]:
            raise SourceError(
                f"the {split} split of {source_name(given.source)} is empty: the source has"
                f" {documents_of.total():,} documents and the held-out fraction is"
                f" {given.fraction}; choose another fraction or give more documents"
            )


def _write(
    given: _Input, tokenizer: "DocumentTokenizer", folder: Path, total_bytes: int | None
) -> Manifest:
    skipped: Counter[str] = Counter()
    writers = {split: _SplitWriter(folder, split, tokenizer.vocab_size) for split in SPLITS}
    done_bytes = done_documents = done_tokens = 0
    with progress("tokenizing", total_bytes) as advance:
        for batch in _batches(given.read(skipped)):
            encoded = tokenizer.encode_documents([text for _, _, text in batch])
            for (split, _, text), tokens in zip(batch, encoded, strict=True):
                writers[split].add(tokens, tokenizer.eod_id)
                done_bytes += len(text.encode())
                done_documents += 1
                done_tokens += tokens.size + 1
            advance(done_bytes, done_documents, done_tokens)
    _require_both_splits(given, Counter({name: len(writers[name].lengths) for name in SPLITS}))
    manifest = Manifest(
        root=folder,
        source=source_name(given.source),
        heldout_fraction=given.fraction,
        seed=given.seed,
        tokenizer=TokenizerFacts(
            name=tokenizer.name,
            fingerprint=tokenizer.save(folder / TOKENIZER),
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
        ),
        train=writers["train"].finish(),
        heldout=writers["heldout"].finish(),
        skipped=dict(skipped),
        blocks=write_blocks(folder, [f"{split}.bin" for split in SPLITS]),
    )
    manifest.write()
    return manifest


def _batches(
    read: Iterable[tuple[SplitName, float, str]],
) -> Iterator[list[tuple[SplitName, float, str]]]:
    batch: list[tuple[SplitName, float, str]] = []
    characters = 0
    for item in read:
        batch.append(item)
        characters += len(item[2])
        if characters >= BATCH_CHARS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _SplitWriter:
    """Write the documents of one split with Megatron's builder."""

    def __init__(self, folder: Path, split: SplitName, vocab_size: int) -> None:
        with quiet_imports(), during_import():
            from megatron.core.datasets import indexed_dataset as megatron
        self.folder = folder
        self.split = split
        self.lengths: list[int] = []
        token_type = megatron.DType.optimal_dtype(vocab_size)
        self.builder = megatron.IndexedDatasetBuilder(str(folder / f"{split}.bin"), token_type)

    def add(self, tokens: Any, eod_id: int) -> None:
        import numpy as np
        import torch

        document = np.append(tokens, np.int32(eod_id))
        self.builder.add_document(torch.from_numpy(document), [document.size])
        self.lengths.append(int(document.size))

    def finish(self) -> Split:
        self.builder.finalize(str(self.folder / f"{self.split}.idx"))
        return Split(
            documents=len(self.lengths),
            tokens=sum(self.lengths),
            longest=max(self.lengths),
            lengths=length_buckets(self.lengths),
            bin=StoredFile.of(self.folder, f"{self.split}.bin"),
            idx=StoredFile.of(self.folder, f"{self.split}.idx"),
        )


def _move(folder: Path, place: Path) -> None:
    """Move a complete store to its destination; the old one is removed last."""
    if not place.exists():
        folder.rename(place)
        return
    old = folder.with_name(folder.name + "-old")
    try:
        place.rename(old)
        folder.rename(place)
    except BaseException:
        if old.exists() and not place.exists():
            old.rename(place)
        raise
    shutil.rmtree(old)
