# SPDX-License-Identifier: Apache-2.0
"""Make a store of Megatron's token files from anywhere, without a copy of their tokens.

    STORE/train-NAME.bin, heldout-NAME.bin    links to the foreign token file
    STORE/train-NAME.idx, heldout-NAME.idx    indexes of its documents for training and held out

A store of one source has no -NAME. The token files stay where they are and must not change: the
manifest has their SHA-256, and that of each block, so that a changed file is noticed.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from data.adoption.checks import Checked, HeldOut, WithoutEod, checked, held_out, opened
from data.adoption.pairs import Named, Pair, pairs_of
from data.files.appearing import replace_folder, require_free
from data.files.sha256 import Hashing
from data.files.sha256 import Part as FilePart
from data.files.whole import folder_beside
from data.files.writable import require_folder
from data.progress import say
from data.splits import LengthBucket, Part, SourceFacts, Split, StoredFile, StoreError
from data.store import SPLITS, TOKENIZER, Manifest, TokenizerFacts, is_store
from data.token_files.megatron_index import write_index
from data.token_files.verification import write_blocks

PACKAGES = {"longhaul": "longhaul-recipes", "tokenizers": "tokenizers", "numpy": "numpy"}
INDEX_BYTES = 20
"""Bytes of an index for each document."""
CHARACTERS = 100
"""Of the first document of a source, for the user to see whether the tokenizer fits."""
SHOWN = 4
"""Sources whose first document is shown."""

if TYPE_CHECKING:
    from data.tokenization.tokenizer import DocumentTokenizer


def adopt(
    paths: Sequence[Named],
    out: Path,
    *,
    tokenizer: str,
    heldout: HeldOut,
    without_eod: WithoutEod = "refuse",
    leave_out_empty: bool = False,
    overwrite: bool = False,
    seed: int = 0,
) -> Manifest:
    """Write a store that lists the documents of token files, and return its manifest.

    Args:
        tokenizer: folder or name of the Hugging Face tokenizer that made the files.
        heldout: how many documents of each source are held out.
        without_eod: what is done about documents that do not end with the tokenizer's eos token.
        overwrite: replace a store at `out` once the new one is complete.
        seed: seed of the hash that chooses the held-out documents.

    Raises:
        ValueError: in one sentence, for files, a tokenizer or a destination that cannot be used.
            Then nothing has been written or replaced.
    """
    place = out.absolute()
    _require_place(out, overwrite)
    pairs = pairs_of(paths)
    _require_elsewhere(pairs, place)
    indexes = [opened(pair, leave_out_empty=leave_out_empty) for pair in pairs]
    documents = sum(len(one.documents) for one in indexes)
    _require_place(out, overwrite, INDEX_BYTES * documents)
    from data.tokenization.tokenizer import load

    say(f"loading the tokenizer {tokenizer}")
    loaded = load(tokenizer)
    skipped: Counter[str] = Counter()
    files = [FilePart(file) for pair in pairs for file in (pair.bin, pair.idx)]
    with folder_beside(place) as folder, Hashing(files) as hashing:
        facts = TokenizerFacts(
            name=loaded.name,
            fingerprint=loaded.save(folder / TOKENIZER),
            vocab_size=loaded.vocab_size,
            eod_id=loaded.eod_id,
        )
        parts: dict[str, list[Part]] = {split: [] for split in SPLITS}
        sources, chosen_documents = [], 0
        read = []
        for one in indexes:
            skipped["empty"] += len(one.index.lengths) - len(one.documents)
            documents_of_pair = checked(one, facts, without_eod)
            skipped["without_eod"] += documents_of_pair.left_out
            read.append((documents_of_pair, held_out(documents_of_pair, heldout, seed)))
        for listed, _ in read[:SHOWN]:
            say(f"{listed.pair.name} begins, read with {loaded.name}: {_beginning(listed, loaded)}")
        say(
            "check that this reads as text: files of ids do not say which tokenizer made them, "
            f"and all of these are ids of {loaded.name}"
        )
        say("hashing the token files")
        sums = [_required(result, part) for result, part in zip(
            hashing.results(), files, strict=True)]  # fmt: skip
        for number, (listed, chosen) in enumerate(read):
            chosen_documents += int(chosen.sum())
            of_bin, of_idx = sums[2 * number : 2 * number + 2]
            sources.append(_source(listed.pair, of_bin, of_idx))
            suffix = "" if len(read) == 1 else f"-{listed.pair.name}"
            for split, documents_of_split in zip(SPLITS, (~chosen, chosen), strict=True):
                parts[split].append(
                    _write(folder, f"{split}{suffix}", listed, documents_of_split, of_bin)
                )
        names = [part.bin.path for split in SPLITS for part in parts[split]]
        manifest = Manifest(
            root=folder,
            sources=tuple(sources),
            heldout_fraction=heldout.fraction or chosen_documents / documents,
            seed=seed,
            tokenizer=facts,
            train=Split(parts=tuple(parts["train"])),
            heldout=Split(parts=tuple(parts["heldout"])),
            skipped={why: count for why, count in skipped.items() if count},
            blocks=write_blocks(folder, names),
            versions=_versions(),
        )
        manifest.write()
        _require_place(out, overwrite)
        replace_folder(folder, place) if overwrite else folder.replace(place)
    unended = sum(listed.unended for listed, _ in read)
    if unended:
        say(
            f"note: {unended:,} documents do not end with the token that ends a document; where "
            "attention stays within documents, it crosses the end of these"
        )
    return replace(manifest, root=place)


def _require_place(out: Path, overwrite: bool, room: float = 0) -> None:
    """Raise ValueError unless the store can be written; only a store is ever overwritten."""
    if overwrite and not out.is_symlink() and is_store(out):
        require_folder(out, "--out", room)
    elif overwrite and out.exists():
        raise StoreError(f"--out {out} is not a store, and only a store is ever overwritten; name "
                         "another folder")  # fmt: skip
    elif is_store(out) and not out.is_symlink():
        raise StoreError(
            f"--out {out} already exists; `--overwrite` replaces it once the new store is complete"
        )
    else:
        require_free(out, room, what="--out")


def _require_elsewhere(pairs: Sequence[Pair], place: Path) -> None:
    """Raise StoreError for token files of the store that would be overwritten: it has links."""
    for pair in pairs:
        if place.resolve() in pair.bin.resolve().parents:
            raise StoreError(
                f"{pair.bin} is in {place}, and a store has links to the files that it adopts; "
                "name another --out"
            )


def _beginning(listed: Checked, tokenizer: "DocumentTokenizer") -> str:
    """Return the first characters of the first document, on one line and in quotes."""
    count = min(int(listed.lengths[0]), 4 * CHARACTERS)
    ids = np.fromfile(listed.pair.bin, listed.dtype, count, offset=int(listed.pointers[0]))
    return repr(tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)[:CHARACTERS])


def _write(
    folder: Path, name: str, listed: Checked, chosen: NDArray[np.bool_], sha256: str
) -> Part:
    """Link the token file of a pair and write the index of chosen documents; return the part."""
    (folder / f"{name}.bin").symlink_to(listed.pair.bin.resolve())
    lengths = listed.lengths[chosen]
    write_index(folder / f"{name}.idx", listed.dtype, lengths, listed.pointers[chosen])
    return Part(
        source=listed.pair.name,
        documents=len(lengths),
        tokens=int(lengths.sum(dtype=np.int64)),
        longest=int(lengths.max()),
        lengths=buckets(lengths),
        bin=StoredFile(
            path=f"{name}.bin", bytes=listed.pair.bin.stat().st_size, sha256=sha256
        ),
        idx=StoredFile.of(folder, f"{name}.idx"),
    )  # fmt: skip


def buckets(lengths: NDArray[np.int32]) -> tuple[LengthBucket, ...]:
    """Count documents and tokens by power of two, as `data.splits.length_buckets` does."""
    exponents = np.frexp(lengths.astype(np.float64))[1] - 1
    documents = np.bincount(exponents)
    tokens = [int(lengths[exponents == one].sum(dtype=np.int64)) for one in range(len(documents))]
    return tuple(
        LengthBucket(at_least=1 << one, documents=int(documents[one]), tokens=tokens[one])
        for one in np.flatnonzero(documents).tolist()
    )


def _source(pair: Pair, of_bin: str, of_idx: str) -> SourceFacts:
    files = [
        (file.name, file.stat().st_size, sha256)
        for file, sha256 in ((pair.bin, of_bin), (pair.idx, of_idx))
    ]
    return SourceFacts(
        name=pair.name,
        kind="adopted",
        origin=str(pair.prefix.absolute()),
        sha256=hashlib.sha256(json.dumps(sorted(files)).encode()).hexdigest(),
    )


def _required(result: str | OSError, part: FilePart) -> str:
    if isinstance(result, OSError):
        raise StoreError(f"{part.path} cannot be read ({result.strerror})") from result
    return result


def _versions() -> dict[str, str]:
    found = {}
    for name, package in PACKAGES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            continue
    return found
