# SPDX-License-Identifier: Apache-2.0
"""Make a store of Megatron's token files from anywhere, without a copy of their tokens.

    STORE/train-NAME.bin, heldout-NAME.bin    links to the foreign token file of a source, or
                                              folders of links if it has several
    STORE/train-NAME.idx, heldout-NAME.idx    indexes of its documents for training and held out

A store of one source has no -NAME. The documents of a source are in the order of its pairs. The
token files stay where they are and must not change: the manifest has their SHA-256, and that of
each block, so that a changed file is noticed.

Pairs are opened one at a time, so that their number is not bounded by that of open files; lengths,
places and hashes of all documents, 20 bytes each, are in memory.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from data.adoption.checks import (
    Checked,
    HeldOut,
    WithoutEod,
    checked,
    held_out,
    opened,
    require_one_type,
)
from data.adoption.pairs import AdoptionError, Named, Pair, pairs_of
from data.files.appearing import replace_folder, require_free
from data.files.sha256 import Hashing
from data.files.sha256 import Part as FilePart
from data.files.whole import folder_beside
from data.files.writable import require_folder
from data.progress import say
from data.splits import Part, SourceFacts, Split, StoredFile, StoreError
from data.store import SPLITS, TOKENIZER, Manifest, TokenizerFacts, is_store, versions
from data.token_files.length_counts import counts_of
from data.token_files.megatron_index import INDEX_BYTES, write_index
from data.token_files.verification import write_blocks

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
    sources = pairs_of(paths)
    _require_elsewhere([pair for pairs in sources.values() for pair in pairs], place)
    documents = _require_usable(sources, leave_out_empty)
    _require_place(out, overwrite, INDEX_BYTES * documents)
    from data.tokenization.tokenizer import load

    say(f"loading the tokenizer {tokenizer}")
    loaded = load(tokenizer)
    skipped: Counter[str] = Counter()
    files = [
        FilePart(file)
        for pairs in sources.values()
        for pair in pairs
        for file in (pair.bin, pair.idx)
    ]
    with folder_beside(place) as folder, Hashing(files) as hashing:
        facts = loaded.save(folder / TOKENIZER)
        parts: dict[str, list[Part]] = {split: [] for split in SPLITS}
        chosen_documents = 0
        read: list[tuple[list[Pair], Checked, NDArray[np.bool_]]] = []
        for pairs in sources.values():
            of_pairs = []
            for pair in pairs:
                one = opened(pair, leave_out_empty=leave_out_empty)
                skipped["empty"] += len(one.index.lengths) - len(one.documents)
                of_pairs.append(checked(one, facts, without_eod, loaded.backend.id_to_token))
            if len(read) < SHOWN:
                _show_beginning(pairs, of_pairs, loaded)
            listed = Checked.joined(of_pairs, [pair.bin.stat().st_size for pair in pairs])
            skipped["without_eod"] += listed.left_out
            if not len(listed.lengths):
                raise AdoptionError(
                    f"no document of {listed.source} ends with the token {facts.eod_id} that ends "
                    f"a document for {loaded.name}, so --without-eod leave-out would leave out "
                    "all; use --without-eod keep"
                )
            read.append((pairs, listed, held_out(listed, heldout, seed)))
        say(
            "check that this reads as text: files of ids do not say which tokenizer made them, "
            f"and all of these are ids of {loaded.name}"
        )
        say("hashing the token files")
        sums = {
            part.path: _required(result, part)
            for result, part in zip(hashing.results(), files, strict=True)
        }
        for pairs, listed, chosen in read:
            chosen_documents += int(chosen.sum())
            suffix = "" if len(read) == 1 else f"-{listed.source}"
            for split, documents_of_split in zip(SPLITS, (~chosen, chosen), strict=True):
                parts[split].append(
                    write_part(folder, f"{split}{suffix}", pairs, listed, documents_of_split, sums)
                )
        names = [file.path for split in SPLITS for part in parts[split] for file in part.bins]
        facts = _as_found(facts, [listed for _, listed, _ in read])
        manifest = Manifest(
            root=folder,
            sources=tuple(_source(pairs, sums) for pairs in sources.values()),
            heldout_fraction=heldout.fraction or chosen_documents / documents,
            seed=seed,
            tokenizer=facts,
            train=Split(parts=tuple(parts["train"])),
            heldout=Split(parts=tuple(parts["heldout"])),
            skipped={why: count for why, count in skipped.items() if count},
            blocks=write_blocks(folder, names),
            versions=versions(),
        )
        manifest.write()
        _require_place(out, overwrite)
        replace_folder(folder, place) if overwrite else folder.replace(place)
    unended = sum(listed.unended for _, listed, _ in read)
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
    elif overwrite and out.is_symlink():
        raise StoreError(f"--out {out} is a link, which is not overwritten; name its target")
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


def _as_found(tokenizer: TokenizerFacts, read: Sequence[Checked]) -> TokenizerFacts:
    """Return the facts of the tokenizer for these documents: what they begin with, if all do."""
    documents = sum(len(listed.lengths) for listed in read)
    begun = sum(listed.begun for listed in read)
    if tokenizer.first_ids and begun < documents:
        say(
            f"note: {tokenizer.name} puts the token {tokenizer.first_ids[0]} before a text, and "
            f"{begun:,} of the {documents:,} documents begin with it; a model that was trained "
            "with it does worse without: write the documents again with it"
        )
    return replace(
        tokenizer,
        first_ids=tokenizer.first_ids if begun == documents else (),
        largest_id=max(listed.largest for listed in read),
    )


def _show_beginning(
    pairs: Sequence[Pair], of_pairs: Sequence[Checked], tokenizer: "DocumentTokenizer"
) -> None:
    """Print the first characters of a source's first document, on one line and in quotes."""
    for pair, listed in zip(pairs, of_pairs, strict=True):
        if len(listed.lengths):
            count = min(int(listed.lengths[0]), 4 * CHARACTERS)
            ids = np.fromfile(pair.bin, listed.dtype, count, offset=int(listed.pointers[0]))
            text = tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)[:CHARACTERS]
            say(f"{listed.source} begins, read with {tokenizer.name}: {text!r}")
            return


def _require_usable(sources: Mapping[str, Sequence[Pair]], leave_out_empty: bool) -> int:
    """Raise ValueError for a pair that cannot be used; return the documents of all."""
    documents = 0
    for name, pairs in sources.items():
        types, before = [], documents
        for pair in pairs:
            one = opened(pair, leave_out_empty=leave_out_empty)
            types.append(one.index.dtype)
            documents += len(one.documents)
        require_one_type(pairs, types)
        if documents == before:
            raise AdoptionError(
                f"{pairs[0].idx if len(pairs) == 1 else f'each index of {name}'} has no document "
                "that is not empty; name a data set that has tokens"
            )
    return documents


def write_part(
    folder: Path,
    name: str,
    pairs: Sequence[Pair],
    listed: Checked,
    chosen: NDArray[np.bool_],
    sums: Mapping[Path, str],
) -> Part:
    """Link the token files of a source and write the index of chosen documents; return the part."""
    links = [f"{name}.bin"]
    if len(pairs) > 1:
        (folder / f"{name}.bin").mkdir()
        digits = max(5, len(str(len(pairs))))
        links = [f"{name}.bin/{number:0{digits}d}.bin" for number in range(len(pairs))]
    for pair, link in zip(pairs, links, strict=True):
        (folder / link).symlink_to(pair.bin.resolve())
    lengths = listed.lengths[chosen]
    counts = counts_of(lengths)
    write_index(folder / f"{name}.idx", listed.dtype, lengths, listed.pointers[chosen])
    return Part(
        source=listed.source,
        documents=counts.documents,
        tokens=counts.tokens,
        longest=counts.longest,
        lengths=counts.buckets(),
        bins=tuple(
            StoredFile(path=link, bytes=pair.bin.stat().st_size, sha256=sums[pair.bin])
            for pair, link in zip(pairs, links, strict=True)
        ),
        idx=StoredFile.of(folder, f"{name}.idx"),
    )


def _source(pairs: Sequence[Pair], sums: Mapping[Path, str]) -> SourceFacts:
    """Return what the manifest says of a source; of several pairs the folder that has them all."""
    top = os.path.commonpath([pair.prefix.absolute().parent for pair in pairs])
    files = [
        (os.path.relpath(file.absolute(), top), file.stat().st_size, sums[file])
        for pair in pairs
        for file in (pair.bin, pair.idx)
    ]
    return SourceFacts(
        name=pairs[0].name,
        kind="adopted",
        origin=str(pairs[0].prefix.absolute()) if len(pairs) == 1 else top,
        sha256=hashlib.sha256(json.dumps(sorted(files)).encode()).hexdigest(),
    )


def _required(result: str | OSError, part: FilePart) -> str:
    if isinstance(result, OSError):
        raise StoreError(f"{part.path} cannot be read ({result.strerror})") from result
    return result
