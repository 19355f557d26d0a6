# SPDX-License-Identifier: Apache-2.0
"""One shard to token files and a receipt; any process may do it at any time, and again."""

import hashlib
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from data.formats.records import LongText, SourceError, Unusable, UnusableError, WholeText
from data.preparation.shard import file_sums, shard_records
from data.preparation.token_files import TokenFiles, TooManyTokensError, spool
from data.preparation.work import Receipt, Work
from data.readers import EMPTY, HALF_SURROGATE, broken, judge
from data.store import SPLITS, SplitName

BATCH_CHARS = 2**21
"""Characters of documents tokenized together."""
LONG_CHARS = 2**23
"""A document of more characters is tokenized in pieces, its ids kept in a file."""
EXAMPLES = 5
"""Skipped records that a receipt names."""


def run_task(work: Work, number: int) -> Receipt:
    """Do a task if it has not been done; return its receipt.

    Raises SourceError, which names file and place, for a record that cannot be used.
    """
    receipt = work.receipt(number)
    if receipt is not None:
        return receipt
    with ExitStack() as stack:
        return _Task(work, number, stack).run()


def split_of(place: float, fraction: float) -> SplitName:
    """Return the split of a document by the hash of its text."""
    return "heldout" if place < fraction else "train"


class ContentHash:
    """The number in [0, 1) of a text that arrives in chunks."""

    def __init__(self, seed: int) -> None:
        self._digest = hashlib.blake2b(digest_size=8, key=str(seed).encode())

    def update(self, encoded: bytes) -> None:
        """Take the next bytes of the text."""
        self._digest.update(encoded)

    def place(self) -> float:
        """Return the number."""
        return (int.from_bytes(self._digest.digest(), "big") >> 11) / 2**53


@dataclass(slots=True)
class _Batch:
    splits: list[SplitName] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    characters: int = 0


class _Task:
    def __init__(self, work: Work, number: int, stack: ExitStack) -> None:
        self.work, self.number = work, number
        self.settings, self.encoder = work.settings, work.encoder
        self.skip_broken = bool(work.facts["skip_broken"])
        prefix = work.prefix(number)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self.files: dict[SplitName, TokenFiles] = {}
        for split in SPLITS:
            files = TokenFiles(work.split_prefix(number, split), self.encoder)
            stack.callback(files.discard)
            self.files[split] = files
        self.spool = prefix.with_name(f"{prefix.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        stack.callback(lambda: self.spool.unlink(missing_ok=True))
        self.batch = _Batch()
        self.skipped = Counter[str]()
        self.examples: list[str] = []
        self.records = self.text_bytes = 0

    def run(self) -> Receipt:
        """Write the files of the shard, and its receipt."""
        shard = self.work.shard(self.number)
        key, count = self.settings.text_key, self.encoder.count
        for origin, content in shard_records(shard, key, count, self.skipped):
            self.records += 1
            found = self._add(content, origin)
            if isinstance(found, Unusable):
                self._skip(origin, found)
        self._flush()
        files = file_sums(shard)
        splits = {str(split): writer.finish() for split, writer in self.files.items()}
        receipt = Receipt(
            key=self.work.key(self.number),
            records=self.records,
            text_bytes=self.text_bytes,
            skipped=dict(sorted(self.skipped.items())),
            examples=self.examples,
            files=files,
            splits=splits,
        )
        self.work.write_receipt(self.number, receipt)
        return receipt

    def _add(self, content: str | LongText | Unusable, origin: object) -> Unusable | None:
        """Take a record; return its problem if it has one."""
        if isinstance(content, str) and len(content) > LONG_CHARS:
            content = WholeText(content)
        if not isinstance(content, str | Unusable):
            self._flush()
            return self._add_long(content, origin)
        judged = judge(content)
        if isinstance(judged, Unusable):
            return judged
        digest, encoded = ContentHash(self.settings.seed), judged.encode()
        digest.update(encoded)
        self.text_bytes += len(encoded)
        self.batch.splits.append(split_of(digest.place(), self.settings.heldout_fraction))
        self.batch.texts.append(judged)
        self.batch.characters += len(judged)
        if self.batch.characters >= BATCH_CHARS:
            self._flush()
        return None

    def _add_long(self, text: LongText, origin: object) -> Unusable | None:
        """Take a document in chunks: its split is known only when its last one has been read."""
        read = _Chunks(text, ContentHash(self.settings.seed))
        try:
            spool(self.encoder.encode_long(read.chunks()), self.spool, self.encoder)
        except UnusableError as error:
            return error.found
        except TooManyTokensError as error:
            raise SourceError(f"{origin}: {error}; cut it in two") from None
        if read.is_blank:
            return EMPTY
        self.text_bytes += read.bytes
        split = split_of(read.hash.place(), self.settings.heldout_fraction)
        self.files[split].add_file(self.spool)
        self.spool.unlink()
        return None

    def _skip(self, origin: object, found: Unusable) -> None:
        if found.reason == "broken" and not self.skip_broken:
            raise broken(origin, found)
        self.skipped[found.reason] += 1
        if len(self.examples) < EXAMPLES and found.reason == "broken":
            self.examples.append(f"{origin}: {found.problem}")

    def _flush(self) -> None:
        batch, self.batch = self.batch, _Batch()
        encoded = self.encoder.encode_documents(batch.texts)
        for split, ids in zip(batch.splits, encoded, strict=True):
            self.files[split].add(ids)


class _Chunks:
    """Pass chunks of a text on, and note what is known once all have passed."""

    def __init__(self, text: LongText, digest: ContentHash) -> None:
        self.text, self.hash = text, digest
        self.bytes = 0
        self.is_blank = True

    def chunks(self) -> Iterator[str]:
        """Yield the chunks; raise UnusableError for one that is not Unicode."""
        for chunk in self.text.chunks():
            try:
                encoded = chunk.encode()
            except UnicodeEncodeError:
                raise UnusableError(HALF_SURROGATE.reason, HALF_SURROGATE.problem) from None
            self.hash.update(encoded)
            self.bytes += len(encoded)
            self.is_blank = self.is_blank and (not chunk or chunk.isspace())
            yield chunk
