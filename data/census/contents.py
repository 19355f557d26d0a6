# SPDX-License-Identifier: Apache-2.0
"""What only the tokens tell: copies of documents, and how well text compresses.

Copies: documents of the same token ids, by the hashes of `data.token_files.document_scan`, over all
sources and both splits; a held-out document with a copy for training is counted too.

Compressibility: bytes of zlib (the algorithm of gzip) over bytes of text, for a seeded sample of
all documents, and one of those of at least `LONG` tokens. Olmo 3 (arXiv 2512.13961) leaves out the
most and the least compressible fifth of long documents, so the ratios that divide the sample in
fifths are stated.
"""

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.progress import progress
from data.token_files.document_scan import scan
from data.token_files.megatron_index import MegatronIndex
from data.token_files.tokens import Tokens

LONG = 8 * 1024
"""Tokens from which a document is long: more than Olmo 3's context before its extension."""
MOST_TOKENS = 2**18
"""Tokens of a document that are compressed: its beginning. zlib looks back 32 KiB."""
LEVEL = 6
"""Of zlib: its default, and gzip's."""
FIFTHS = (0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """Documents whose token ids another document has too, the first of them not counted."""

    documents: int
    tokens: int
    largest_group_documents: int
    """Documents of the text that has most copies, the first counted; 1 if none has."""
    heldout_documents_in_train: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Compression:
    """Compressed bytes over bytes of sampled documents."""

    source: str
    """A source, or all of them."""
    at_least_tokens: int
    documents: int
    """In the sample."""
    fifths: tuple[float, ...]
    """The ratios that divide the sample in fifths, ascending; empty for less than 5 documents."""
    smallest: float
    largest: float


def copies(train: Sequence[MegatronIndex], heldout: Sequence[MegatronIndex]) -> Copies:
    """Count copies among the documents of a store by reading all of its tokens."""
    of_train, of_heldout = _hashes(train), _hashes(heldout)
    lengths = np.concatenate([np.asarray(one.lengths) for one in train])
    order = np.argsort(of_train, kind="stable")
    ordered = of_train[order]
    is_copy = np.zeros(len(ordered), dtype=bool)
    is_copy[1:] = ordered[1:] == ordered[:-1]
    starts = np.flatnonzero(~is_copy)
    largest = int(np.diff(np.append(starts, len(ordered))).max(initial=0))
    return Copies(
        documents=int(is_copy.sum()),
        tokens=int(lengths[order[is_copy]].sum(dtype=np.int64)),
        largest_group_documents=largest,
        heldout_documents_in_train=int(np.isin(of_heldout, ordered).sum()),
    )


def compression(
    sources: Sequence[tuple[str, MegatronIndex]], tokenizer: Path, eod_id: int, *,
    sample: int, seed: int, first: int = 0,
) -> tuple[Compression, ...]:  # fmt: skip
    """Compress a sample of each source's documents: `sample` of all, and as many long ones.

    Args:
        sources: name and training documents of each.
        tokenizer: folder of the tokenizer, to turn ids into text.
        first: tokens at the beginning of a document that are not of its text.
    """
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def ratio(ids: Tokens) -> float:
        kept = ids[first:-1] if len(ids) > first + 1 and ids[-1] == eod_id else ids
        text = backend.decode(kept.tolist(), skip_special_tokens=False).encode()
        return len(zlib.compress(text, LEVEL)) / max(len(text), 1)

    draw = np.random.default_rng(seed)
    found = []
    of_all: dict[int, list[float]] = {1: [], LONG: []}
    for name, index in sources:
        for at_least in of_all:
            ratios = _ratios(index, at_least, sample, draw, ratio)
            of_all[at_least] += ratios
            found.append(_compression(name, at_least, ratios))
    if len(sources) > 1:
        found += [_compression("all", at_least, ratios) for at_least, ratios in of_all.items()]
    return tuple(found)


def _hashes(indexes: Sequence[MegatronIndex]) -> NDArray[np.uint64]:
    found = [np.empty(0, dtype=np.uint64)]
    for index in indexes:
        width = index.dtype.itemsize
        with progress(f"reading {index.bin_path.name}", index.tokens * width) as advance:
            facts = scan(
                index.mapped(),
                index.pointers // width,
                index.lengths,
                -1,
                lambda documents, tokens, width=width, advance=advance: advance(  # type: ignore[misc]
                    tokens * width, documents, tokens
                ),
            )
        found.append(facts.hashes)
    return np.concatenate(found)


def _ratios(
    index: MegatronIndex,
    at_least: int,
    sample: int,
    draw: np.random.Generator,
    ratio: Callable[[Tokens], float],
) -> list[float]:
    numbers = np.flatnonzero(np.asarray(index.lengths) >= at_least)
    if len(numbers) > sample:
        numbers = np.sort(draw.choice(numbers, sample, replace=False))
    tokens = index.mapped()
    starts = index.pointers[numbers] // index.dtype.itemsize
    stops = starts + np.minimum(index.lengths[numbers], MOST_TOKENS)
    with ThreadPoolExecutor() as pool:
        return list(
            pool.map(
                lambda place: ratio(tokens[place[0] : place[1]]), zip(starts, stops, strict=True)
            )
        )


def _compression(source: str, at_least: int, ratios: Sequence[float]) -> Compression:
    enough = len(ratios) > len(FIFTHS)
    return Compression(
        source=source,
        at_least_tokens=at_least,
        documents=len(ratios),
        fifths=tuple(float(one) for one in np.quantile(ratios, FIFTHS)) if enough else (),
        smallest=min(ratios, default=0.0),
        largest=max(ratios, default=0.0),
    )
