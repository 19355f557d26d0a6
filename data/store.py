# SPDX-License-Identifier: Apache-2.0
"""The token store on disk, its manifest, and the checks a store must pass before it is used.

    STORE/train.bin, train.idx        Megatron IndexedDataset, one sequence a document, each
    STORE/heldout.bin, heldout.idx    document ended by the eod token
    STORE/tokenizer/                  a Hugging Face tokenizer folder
    STORE/blocks.json                 SHA-256 of each block of train.bin and heldout.bin
    STORE/manifest.json               a description of the files; written last

A folder without a manifest is an unfinished store. Loading a manifest checks the size of every
file; `data.verification` checks the content.

Only the standard library is imported here, so that a bad store is refused at once.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from data.files.nearest import near_path
from data.files.sha256 import sha256_of

FORMAT = "longhaul-token-store"
VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
TOKENIZER_FILE = "tokenizer.json"

SplitName = Literal["train", "heldout"]
SPLITS: tuple[SplitName, ...] = ("train", "heldout")


class StoreError(ValueError):
    """A store that cannot be used; the message says which file and why in one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """Size and hash of a file of the store when it was written."""

    path: str
    """Relative to the store."""
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        """Refuse a path that leaves the store."""
        if not isinstance(self.bytes, int) or not isinstance(self.sha256, str):
            raise StoreError(f"the size or hash of {self.path!r} is not one")
        path = PurePosixPath(self.path)
        if path.is_absolute() or ".." in path.parts or "\\" in self.path or not path.parts:
            raise StoreError(f"the manifest names a file outside the store: {self.path!r}")

    @classmethod
    def of(cls, root: Path, path: str) -> "StoredFile":
        """Measure a file that has just been written."""
        file = root / path
        (sha256,) = sha256_of([file])
        return cls(path=path, bytes=file.stat().st_size, sha256=sha256)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBucket:
    """The documents of at least this many tokens and fewer than twice as many."""

    at_least: int
    documents: int
    tokens: int

    def __post_init__(self) -> None:
        """Refuse numbers that no documents have."""
        numbers = (self.at_least, self.documents, self.tokens)
        if not all(type(number) is int and number > 0 for number in numbers) or not (
            self.at_least * self.documents <= self.tokens < 2 * self.at_least * self.documents
        ):
            raise StoreError(f"no documents have the lengths {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The documents of one split; token counts include one eod token a document."""

    documents: int
    tokens: int
    longest: int
    """Tokens of the longest document."""
    lengths: tuple[LengthBucket, ...]
    bin: StoredFile
    idx: StoredFile

    def __post_init__(self) -> None:
        """Refuse a split whose two files differ in name, since Megatron needs the same name."""
        if self.bin.path.removesuffix(".bin") != self.idx.path.removesuffix(".idx"):
            raise StoreError(f"{self.bin.path} and {self.idx.path} are not the files of one split")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFacts:
    """The tokenizer that made a store."""

    name: str
    fingerprint: str
    vocab_size: int
    eod_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Content of a store: its files, splits and tokenizer."""

    root: Path
    source: str
    heldout_fraction: float
    seed: int
    tokenizer: TokenizerFacts
    train: Split
    heldout: Split
    skipped: dict[str, int]
    """Skipped records, by reason."""
    blocks: StoredFile | None = None
    """The sums of the blocks of token files (`data.verification`); older stores have none."""

    @classmethod
    def load(cls, store: Path | str) -> "Manifest":
        """Read the manifest of a store and check that all files have their original size.

        Raises:
            StoreError: if the store is missing, unfinished, truncated or of another format.
        """
        root = Path(store)
        if not root.is_dir():
            raise StoreError(
                f"there is no store at {root}{near_path(root)}; `longhaul prepare` makes one"
            )
        try:
            content = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise StoreError(
                f"{root} has no {MANIFEST}: it is not a store, or was never finished; "
                "`longhaul prepare` makes one"
            ) from None
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{root / MANIFEST} cannot be read ({error}); restore it, or prepare the store "
                "again"
            ) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise StoreError(f"{root / MANIFEST} is not the manifest of a token store")
        if content.get("version") != VERSION:
            raise StoreError(
                f"{root / MANIFEST} has format version {content.get('version')!r}, this program"
                f" reads version {VERSION}; prepare the store again"
            )
        manifest = cls._from_json(root, content)
        manifest._require_files()
        return manifest

    @classmethod
    def _from_json(cls, root: Path, content: dict[str, Any]) -> "Manifest":
        try:
            return cls(
                root=root,
                source=content["source"],
                heldout_fraction=content["heldout_fraction"],
                seed=content["seed"],
                tokenizer=TokenizerFacts(**content["tokenizer"]),
                train=_split(content["splits"]["train"]),
                heldout=_split(content["splits"]["heldout"]),
                skipped=dict(content["skipped"]),
                blocks=StoredFile(**content["blocks"]) if content.get("blocks") else None,
            )
        except StoreError as error:
            raise StoreError(f"{root / MANIFEST} is damaged: {error}") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise StoreError(
                f"{root / MANIFEST} is damaged ({type(error).__name__}: {error})"
            ) from error

    def write(self) -> None:
        """Write the manifest; the last step of making a store."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "source": self.source,
            "heldout_fraction": self.heldout_fraction,
            "seed": self.seed,
            "tokenizer": asdict(self.tokenizer),
            "splits": {name: asdict(self.split(name)) for name in SPLITS},
            "skipped": dict(sorted(self.skipped.items())),
            "blocks": None if self.blocks is None else asdict(self.blocks),
        }
        text = json.dumps(content, indent=2) + "\n"
        (self.root / MANIFEST).write_text(text, encoding="utf-8")

    def split(self, name: SplitName) -> Split:
        """Return the facts of a split."""
        if name not in SPLITS:
            raise StoreError(f"a store has the splits {' and '.join(SPLITS)}, not {name!r}")
        return self.train if name == "train" else self.heldout

    def split_prefix(self, name: SplitName) -> Path:
        """Return the path of a split without its ending, as Megatron takes it."""
        return self.root / self.split(name).bin.path.removesuffix(".bin")

    @property
    def tokenizer_path(self) -> Path:
        """The folder that `AutoTokenizer.from_pretrained` reads."""
        return self.root / TOKENIZER

    def _files(self) -> Iterable[StoredFile]:
        found = [file for name in SPLITS for file in (self.split(name).bin, self.split(name).idx)]
        return found if self.blocks is None else [*found, self.blocks]

    def _require_files(self) -> None:
        for file in self._files():
            path = self.root / file.path
            if not path.is_file():
                raise StoreError(f"the store has lost a file: {path} does not exist")
            size = path.stat().st_size
            if size != file.bytes:
                raise StoreError(
                    f"{path} has {size:,} bytes where {file.bytes:,} were written; it is truncated"
                    " or was changed"
                )
        if not (self.tokenizer_path / TOKENIZER_FILE).is_file():
            raise StoreError(
                f"the store has lost its tokenizer: {self.tokenizer_path} is incomplete"
            )


def is_store(folder: Path) -> bool:
    """Whether a folder has the manifest of a store, of any version and in any state."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def require_tokenizer(manifest: Manifest, fingerprint: str, of: str = "its files now have") -> None:
    """Raise StoreError unless the store was made with the tokenizer of this fingerprint.

    `of` says in the message what has that tokenizer, such as `the checkpoint FOLDER has`.
    """
    if manifest.tokenizer.fingerprint != fingerprint:
        raise StoreError(
            f"the store {manifest.root} was made with another tokenizer than {of}:"
            f" {manifest.tokenizer.name} with SHA-256 {manifest.tokenizer.fingerprint}, not"
            f" {fingerprint}"
        )


def tokenizer_fingerprint(folder: Path) -> str:
    """Return the sha256 of a tokenizer's definition, whatever the layout of its file.

    Truncation and padding do not count: they are settings of a call that a save may keep.
    """
    file = folder / TOKENIZER_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{file} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise StoreError(f"{file} is not the definition of a tokenizer")
    definition = {key: content[key] for key in content if key not in ("truncation", "padding")}
    canonical = json.dumps(definition, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def length_buckets(lengths: Iterable[int]) -> tuple[LengthBucket, ...]:
    """Count documents and tokens by power of two, from the shortest to the longest document."""
    documents: dict[int, int] = {}
    tokens: dict[int, int] = {}
    for length in lengths:
        at_least = 1 << (length.bit_length() - 1)
        documents[at_least] = documents.get(at_least, 0) + 1
        tokens[at_least] = tokens.get(at_least, 0) + length
    return tuple(
        LengthBucket(at_least=bound, documents=documents[bound], tokens=tokens[bound])
        for bound in sorted(documents)
    )


def _split(content: dict[str, Any]) -> Split:
    return Split(
        documents=content["documents"],
        tokens=content["tokens"],
        longest=content["longest"],
        lengths=tuple(LengthBucket(**bucket) for bucket in content["lengths"]),
        bin=StoredFile(**content["bin"]),
        idx=StoredFile(**content["idx"]),
    )
