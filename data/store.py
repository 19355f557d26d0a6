# SPDX-License-Identifier: Apache-2.0
"""The token store on disk, its manifest, and the checks a store must pass before it is used.

    STORE/train.bin, train.idx        Megatron IndexedDataset, one sequence a document, each
    STORE/heldout.bin, heldout.idx    document ended by the eod token
    STORE/tokenizer/                  a Hugging Face tokenizer folder
    STORE/blocks.json                 SHA-256 of each block of the token files
    STORE/manifest.json               a description of the files; written last

A store of several sources has a pair of files for each, such as train-web.bin and train-web.idx. An
index may leave documents of its token file out, and the token file may be a link: that is how a
store adopts files that other tools wrote. If they wrote several for a source, train-web.bin is a
folder of links, and the index counts bytes through all of their files (`data.token_files.tokens`).

A folder without a manifest is an unfinished store. Loading a manifest checks the size of every
file; `data.token_files.verification` checks the content.

Only the standard library is imported here, so that a bad store is refused at once.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from data.files.nearest import near_path
from data.files.own_sum import has_wrong_sum, with_own_sum
from data.splits import LengthBucket, Part, SourceFacts, Split, StoredFile
from data.splits import StoreError as StoreError  # most callers have to do with the manifest alone

FORMAT = "longhaul-token-store"
VERSION = 3
READ_VERSIONS = (1, 2, 3)
"""Version 1 has one source, which had no name; 1 and 2 have one token file for each index."""
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
TOKENIZER_FILE = "tokenizer.json"
EOD = "eod_id"
"""Key of a checkpoint's marker: the token that ended the documents it was trained on."""
_SAID = {"tokenizer": "SHA-256", EOD: "the end-of-document token"}

TRAINED = "byte-level-bpe"
"""Name of a tokenizer that was trained on the documents of the store."""
ONLY_SOURCE = "documents"
"""Name of a source that the user gave no name."""
SplitName = Literal["train", "heldout"]
SPLITS: tuple[SplitName, ...] = ("train", "heldout")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFacts:
    """The tokenizer that made a store."""

    name: str
    fingerprint: str
    vocab_size: int
    eod_id: int
    first_ids: tuple[int, ...] | None = None
    """Tokens with which every document begins; None in older stores, whose documents have none."""
    largest_id: int | None = None
    """Largest id of the documents, or that they can have; older stores do not say."""

    def __post_init__(self) -> None:
        """Take the tokens as JSON has them."""
        if self.first_ids is not None:
            object.__setattr__(self, "first_ids", tuple(self.first_ids))


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Content of a store: its files, splits and tokenizer."""

    root: Path
    sources: tuple[SourceFacts, ...]
    heldout_fraction: float
    seed: int
    tokenizer: TokenizerFacts
    train: Split
    heldout: Split
    skipped: dict[str, int]
    """Skipped records, by reason."""
    blocks: StoredFile | None = None
    """The sums of the blocks of token files; older stores have none."""
    versions: dict[str, str] = field(default_factory=dict)
    """Releases of the packages that made it."""
    tokenizer_files: tuple[StoredFile, ...] = field(default=(), compare=False)
    """Those next to the tokenizer's definition, which has a fingerprint; older stores list none."""

    def __post_init__(self) -> None:
        """Refuse parts of sources that are not listed, and sources listed twice."""
        names = [source.name for source in self.sources]
        for split in SPLITS:
            for part in self.split(split).parts:
                if names.count(part.source) != 1:
                    raise StoreError(
                        f"{part.prefix} is of the source {part.source!r}; the manifest lists "
                        f"{', '.join(names) or 'none'}"
                    )

    @property
    def train_sha256(self) -> str:
        """SHA-256 of the sums of the training files; that of another store is another one."""
        files = [file for part in self.train.parts for file in (part.idx, *part.bins)]
        return hashlib.sha256("\n".join(file.sha256 for file in files).encode()).hexdigest()

    @classmethod
    def load(cls, store: Path | str) -> "Manifest":
        """Read the manifest of a store and check that all files have their original size.

        Raises:
            StoreError: if the store is missing, unfinished, truncated or of another format.
        """
        root = Path(store)
        if root.is_file():
            raise StoreError(f"{root} is a file; expected the folder of a store")
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
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise StoreError(
                f"{root / MANIFEST} cannot be read: {reason}; give this user the right to read it, "
                "or restore it from a copy"
            ) from error
        except ValueError as error:
            raise StoreError(
                f"{root / MANIFEST} is not JSON ({error}): it is damaged; restore it from a copy, "
                "or prepare the store again"
            ) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise StoreError(f"{root / MANIFEST} is not the manifest of a token store")
        if content.get("version") not in READ_VERSIONS:
            raise StoreError(
                f"{root / MANIFEST} has format version {content.get('version')!r}, this program"
                f" reads version {VERSION}; prepare the store again"
            )
        if has_wrong_sum(content):
            raise StoreError(
                f"{root / MANIFEST} is damaged: its SHA-256 differs from what was written; restore "
                "it from a copy, or prepare the store again"
            )
        manifest = cls._from_json(root, content)
        manifest._require_files()
        return manifest

    @classmethod
    def _from_json(cls, root: Path, content: dict[str, Any]) -> "Manifest":
        try:
            return cls(
                root=root,
                sources=_sources(content),
                heldout_fraction=content["heldout_fraction"],
                seed=content["seed"],
                tokenizer=TokenizerFacts(**content["tokenizer"]),
                train=_split(content["splits"]["train"]),
                heldout=_split(content["splits"]["heldout"]),
                skipped=dict(content["skipped"]),
                blocks=StoredFile(**content["blocks"]) if content.get("blocks") else None,
                versions=dict(content.get("versions", {})),
                tokenizer_files=tuple(
                    StoredFile(**file) for file in content.get("tokenizer_files", ())
                ),
            )
        except StoreError as error:
            raise StoreError(f"{root / MANIFEST} is damaged: {error}") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise StoreError(
                f"{root / MANIFEST} is damaged ({type(error).__name__}: {error})"
            ) from error

    def write(self) -> None:
        """Write the manifest, with the tokenizer's files as they are; the last step of a store."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "sources": [asdict(source) for source in self.sources],
            "heldout_fraction": self.heldout_fraction,
            "seed": self.seed,
            "tokenizer": asdict(self.tokenizer),
            "splits": {name: asdict(self.split(name)) for name in SPLITS},
            "skipped": dict(sorted(self.skipped.items())),
            "blocks": None if self.blocks is None else asdict(self.blocks),
            "versions": self.versions,
            "tokenizer_files": [
                asdict(StoredFile.of(self.root, path.relative_to(self.root).as_posix()))
                for path in sorted(self.tokenizer_path.rglob("*"))
                if path.is_file() and path != self.tokenizer_path / TOKENIZER_FILE
            ],
        }
        text = json.dumps(with_own_sum(content), indent=2) + "\n"
        (self.root / MANIFEST).write_text(text, encoding="utf-8")

    def split(self, name: SplitName) -> Split:
        """Return the facts of a split."""
        if name not in SPLITS:
            raise StoreError(f"a store has the splits {' and '.join(SPLITS)}, not {name!r}")
        return self.train if name == "train" else self.heldout

    def prefixes(self, name: SplitName) -> tuple[Path, ...]:
        """Return the paths of a split's parts without their endings, as Megatron takes them."""
        return tuple(self.root / part.prefix for part in self.split(name).parts)

    @property
    def source(self) -> str:
        """Where the documents come from, in words."""
        if len(self.sources) == 1:
            return self.sources[0].origin
        return ", ".join(f"{source.name} ({source.origin})" for source in self.sources)

    @property
    def first_tokens(self) -> int:
        """How many tokens every document begins with that are not of its text."""
        return len(self.tokenizer.first_ids or ())

    @property
    def tokenizer_path(self) -> Path:
        """The folder that `AutoTokenizer.from_pretrained` reads."""
        return self.root / TOKENIZER

    def _files(self) -> Iterable[StoredFile]:
        parts = [part for name in SPLITS for part in self.split(name).parts]
        files = [file for part in parts for file in (*part.bins, part.idx)]
        files += self.tokenizer_files
        return files if self.blocks is None else [*files, self.blocks]

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
        for part in (part for name in SPLITS for part in self.split(name).parts):
            folder = self.root / f"{part.prefix}.bin"
            if folder.is_dir() and (found := len(list(folder.glob("*.bin")))) != len(part.bins):
                raise StoreError(
                    f"{folder} has {found:,} token files and the manifest lists {len(part.bins):,};"
                    " remove those that are not of the store, or make the store again"
                )
        if not (self.tokenizer_path / TOKENIZER_FILE).is_file():
            raise StoreError(
                f"the store has lost a file: {self.tokenizer_path / TOKENIZER_FILE} does not exist"
            )


def versions() -> dict[str, str]:
    """Return the releases of the packages that make a store, as a manifest has them."""
    from importlib.metadata import PackageNotFoundError, version  # takes time to import

    found = {}
    for name in ("longhaul-recipes", "tokenizers", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def is_store(folder: Path) -> bool:
    """Whether a folder has the manifest of a store, of any version and in any state."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def tokenizer_named(name: str) -> str:
    """Return the tokenizer's folder for the folder of a store; any other name as it is."""
    return str(Path(name, TOKENIZER)) if is_store(Path(name)) else name


def require_rows(manifest: Manifest, rows: int) -> None:
    """Raise StoreError unless a model's embedding has a row for each token of the documents.

    A tokenizer may have more special tokens than the model has rows for, as long as none occurs.
    """
    facts = manifest.tokenizer
    largest = facts.vocab_size - 1 if facts.largest_id is None else facts.largest_id
    if largest >= rows:
        what = f"documents of {manifest.root} have token ids up to {largest:,}"
        again = "the model's tokenizer, by --tokenizer"
        if facts.largest_id is None:
            what = f"the tokenizer of {manifest.root} has {facts.vocab_size:,} tokens"
            again += "; a store made today says which of its tokens occur"
        if facts.name == TRAINED:
            again = f"--vocab-size {rows}"
        raise StoreError(f"{what} and the model has {rows:,} rows; prepare the store with {again}")


def tokenizer_marker(facts: TokenizerFacts) -> dict[str, Any]:
    """Return what a checkpoint's marker says of the tokenizer of its documents."""
    return {"tokenizer": facts.fingerprint, EOD: facts.eod_id}


def require_tokenizer(manifest: Manifest, marker: Mapping[str, Any], of: str) -> None:
    """Raise StoreError unless the store was made with the tokenizer that a marker names.

    The definition decides the ids of a text and what comes first, the end of document is stated
    apart; older markers have none. `of` says in the message what has that tokenizer, such as `the
    checkpoint FOLDER has`.
    """
    mine = tokenizer_marker(manifest.tokenizer)
    if differing := differing_tokenizer(mine, marker):
        words = " and ".join(f"{_SAID[key]} {mine[key]}, not {marker[key]}" for key in differing)
        raise StoreError(
            f"the store {manifest.root} was made with another tokenizer than {of}: "
            f"{manifest.tokenizer.name} with {words}"
        )


def differing_tokenizer(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys of two markers that say that their tokenizers differ."""
    return [key for key in _SAID if key in one and key in other and one[key] != other[key]]


def require_own_tokenizer(manifest: Manifest) -> None:
    """Raise StoreError unless the store's tokenizer can be read and is the one it was made with."""
    folder = manifest.tokenizer_path
    fingerprint = tokenizer_fingerprint(folder)
    require_tokenizer(manifest, {"tokenizer": fingerprint}, f"{folder / TOKENIZER_FILE} now has")


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


def _sources(content: dict[str, Any]) -> tuple[SourceFacts, ...]:
    if content["version"] == 1:
        return (SourceFacts(name=ONLY_SOURCE, kind="documents", origin=content["source"]),)
    return tuple(SourceFacts(**source) for source in content["sources"])


def _split(content: dict[str, Any]) -> Split:
    parts = content.get("parts", [{"source": ONLY_SOURCE, **content}])  # version 1 has none
    return Split(parts=tuple(_part(part) for part in parts))


def _part(content: dict[str, Any]) -> Part:
    bins = content["bins"] if "bins" in content else [content["bin"]]
    return Part(
        source=content["source"],
        documents=content["documents"],
        tokens=content["tokens"],
        longest=content["longest"],
        lengths=tuple(LengthBucket(**bucket) for bucket in content["lengths"]),
        bins=tuple(StoredFile(**file) for file in bins),
        idx=StoredFile(**content["idx"]),
    )
