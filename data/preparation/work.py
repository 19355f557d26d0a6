# SPDX-License-Identifier: Apache-2.0
"""The folder in which a store is prepared, next to the store.

    .STORE.preparing/plan.json, shards.jsonl   the plan
    .STORE.preparing/encoder.json, tokenizer/  the tokenizer
    .STORE.preparing/parts/AB/KEY.*            token files of a shard, and KEY.json, its receipt
    .STORE.preparing/store/                    the store, while it is merged

A key is a hash of all that the files depend on, so a changed plan uses the parts that it shares
with the one before: after a file is corrected, only its shards are done again.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from data.files.whole import write_text
from data.preparation.plan import Plan, Settings, Shard
from data.preparation.token_files import TokenFacts
from data.store import SPLITS, SplitName, StoreError, versions
from data.tokenization.encoder import Encoder

LONGEST_NAME = 200
"""Bytes of a store's name that the name of its work folder may have."""
FORMAT = 1
"""Raised when tasks write other bytes than before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What a task has written; its own file is written last."""

    key: str
    records: int
    text_bytes: int
    """Bytes of the text of the documents."""
    skipped: dict[str, int]
    examples: list[str]
    """The first records that were skipped, each with its place and its problem."""
    files: dict[str, str | None]
    """SHA-256 of the input files that begin in the shard."""
    splits: dict[str, TokenFacts] = field(default_factory=dict)

    @property
    def documents(self) -> int:
        """Documents of all splits."""
        return sum(facts.documents for facts in self.splits.values())

    @property
    def tokens(self) -> int:
        """Tokens of all splits."""
        return sum(facts.tokens for facts in self.splits.values())

    def json(self) -> str:
        """Return the receipt as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> "Receipt":
        """Return the receipt that `json` returned."""
        content = json.loads(text)
        splits = {name: TokenFacts(**facts) for name, facts in content.pop("splits").items()}
        return cls(**content, splits=splits)


class HeldError(StoreError):
    """Another process prepares the same store."""


class Work:
    """A folder in which a store is prepared."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_store(cls, place: Path) -> "Work":
        """Return the folder in which the store at a path is prepared."""
        name = place.name
        if len(name.encode()) > LONGEST_NAME:
            name = f"{name[:50]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        return cls(place.with_name(f".{name}.preparing"))

    @classmethod
    def open(cls, folder: Path) -> "Work":
        """Return the folder of a plan; raise StoreError for another folder."""
        work = cls(folder.absolute())
        if not work.is_planned:
            raise StoreError(
                f"{folder} is not the folder of a plan; `longhaul prepare --plan-only` prints one"
            )
        return work

    @property
    def is_planned(self) -> bool:
        """Whether the plan and the tokenizer are complete."""
        return (self.folder / "plan.json").is_file()

    @property
    def place(self) -> Path:
        """The store that the plan is of; StoreError for one that is prepared in another folder."""
        name = self.facts.get("store")
        if isinstance(name, str) and name not in ("", "..") and Path(name).name == name:
            place = self.folder.with_name(name)
            if Work.of_store(place).folder == self.folder:
                return place
        raise StoreError(
            f"{self.folder / 'plan.json'} names the store {name!r}, which is not prepared in this "
            "folder; make the plan again with longhaul prepare --plan-only"
        )

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's folder as a store has it."""
        return self.folder / "tokenizer"

    @property
    def store(self) -> Path:
        """The folder in which the store is merged."""
        return self.folder / "store"

    @cached_property
    def plan(self) -> Plan:
        """The plan."""
        return Plan.of(self.facts["plan"], self._lines)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What is known of the store apart from the shards."""
        return dict(json.loads((self.folder / "plan.json").read_text(encoding="utf-8")))

    @cached_property
    def _lines(self) -> list[bytes]:
        return (self.folder / "shards.jsonl").read_bytes().splitlines()

    @cached_property
    def settings(self) -> Settings:
        """What tasks depend on, without reading the shards."""
        return Settings(**self.facts["plan"]["settings"])

    @cached_property
    def encoder(self) -> Encoder:
        """The tokenizer, for tasks."""
        return Encoder.load(self.folder / "encoder.json")

    @cached_property
    def _key_of_settings(self) -> str:
        return json.dumps(
            [FORMAT, self.facts["plan"]["settings"], self.encoder.sha256, versions()["tokenizers"]],
            sort_keys=True,
        )

    @property
    def count(self) -> int:
        """Shards of the plan."""
        return len(self._lines)

    def write_plan(self, plan: Plan, **facts: Any) -> None:
        """Write the plan once the tokenizer is there; `facts` are for the merge."""
        self._clear()
        lines = "".join(shard.line() + "\n" for shard in plan.shards)
        write_text(self.folder / "shards.jsonl", lines)
        content = {"plan": plan.head(), "sha256": plan.sha256, "versions": versions(), **facts}
        write_text(self.folder / "plan.json", json.dumps(content, indent=1) + "\n")

    def shard(self, number: int) -> Shard:
        """Return a shard, without reading the others."""
        return Shard.of_line(self._lines[number])

    def key(self, number: int) -> str:
        """Return the name of a shard's files."""
        pieces = json.loads(self._lines[number])["pieces"]
        text = f"{self._key_of_settings}{json.dumps(pieces, sort_keys=True)}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def prefix(self, number: int) -> Path:
        """Return the path of a shard's files, without what follows the key."""
        key = self.key(number)
        return self.folder / "parts" / key[:2] / key

    def split_prefix(self, number: int, split: SplitName) -> Path:
        """Return the path of the files of one split of a shard, without their endings."""
        prefix = self.prefix(number)
        return prefix.with_name(f"{prefix.name}.{split}")

    def receipt(self, number: int) -> Receipt | None:
        """Return the receipt of a shard whose files have their sizes, else None."""
        path = self._receipt_path(number)
        try:
            receipt = Receipt.of_json(path.read_text(encoding="utf-8"))
            for split in SPLITS:
                facts, prefix = receipt.splits[split], self.split_prefix(number, split)
                expected = {".bin": facts.bin_bytes, ".lengths": 4 * facts.documents}
                for ending, size in expected.items():
                    if prefix.with_name(prefix.name + ending).stat().st_size != size:
                        return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return receipt

    def write_receipt(self, number: int, receipt: Receipt) -> None:
        """Write the receipt of a shard, the last file of its task."""
        path = self._receipt_path(number)
        hidden = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        try:
            hidden.write_text(receipt.json() + "\n", encoding="utf-8")
            hidden.replace(path)
        finally:
            hidden.unlink(missing_ok=True)

    def forget(self, number: int) -> None:
        """Remove the receipt of a shard whose files are damaged."""
        self._receipt_path(number).unlink(missing_ok=True)

    def _receipt_path(self, number: int) -> Path:
        prefix = self.prefix(number)
        return prefix.with_name(prefix.name + ".json")

    def by_size(self) -> list[int]:
        """Return the numbers of all shards, the largest first."""
        shards = self.plan.shards
        return sorted(range(self.count), key=lambda number: (-shards[number].cost, number))

    def missing(self) -> list[int]:
        """Return the numbers of the shards without a receipt, the largest first."""
        return [number for number in self.by_size() if self.receipt(number) is None]

    def forget_plan(self) -> None:
        """Remove the plan before another is written; the parts stay."""
        (self.folder / "plan.json").unlink(missing_ok=True)
        self._clear()

    def _clear(self) -> None:
        for name in ("plan", "facts", "settings", "encoder", "_lines", "_key_of_settings"):
            self.__dict__.pop(name, None)

    def has_parts(self) -> bool:
        """Whether any task has finished."""
        return any((self.folder / "parts").glob("*/*.json"))

    def bytes_of_parts(self) -> int:
        """Return the bytes of the files that tasks have written."""
        return sum(path.stat().st_size for path in (self.folder / "parts").glob("*/*"))

    def require_same_versions(self) -> None:
        """Raise StoreError if another release of tokenizers made the plan."""
        planned, here = self.facts["versions"]["tokenizers"], versions()["tokenizers"]
        if planned != here:
            raise StoreError(
                f"the plan {self.folder} was made with tokenizers {planned}, and this environment "
                f"has {here}; use one environment for the whole store"
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder; raise StoreError if another process of this machine prepares in it."""
        import fcntl

        self.folder.mkdir(parents=True, exist_ok=True)
        file = os.open(self.folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HeldError(
                    f"another process prepares in {self.folder}; wait for it, or end it first"
                ) from None
            except OSError:
                pass  # a file system without locks
            yield
        finally:
            os.close(file)
