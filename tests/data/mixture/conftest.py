# SPDX-License-Identifier: Apache-2.0
"""A store of two sources, whose documents differ in length."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.splits import Part, SourceFacts, Split, StoredFile
from data.store import Manifest
from data.token_files.length_counts import counts_of

EOD = 0
LENGTHS = {"web": (8, 40), "books": (60, 300)}


def document(source: str, number: int, length: int) -> np.ndarray:
    """Return tokens that tell their source, document and place."""
    base = 1000 if source == "web" else 20_000
    tokens = base + (number * 7 + np.arange(length)) % 9_000
    return np.append(tokens[:-1], EOD).astype(np.int32)


def part(root: Path, source: str, split: str, count: int, seed: int) -> Part:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    name = f"{split}-{source}"
    builder = IndexedDatasetBuilder(str(root / f"{name}.bin"), np.int32)
    draw = np.random.default_rng(seed)
    lengths = draw.integers(*LENGTHS[source], size=count).tolist()
    for number, length in enumerate(lengths):
        builder.add_document(torch.from_numpy(document(source, number, length)), [length])
    builder.finalize(str(root / f"{name}.idx"))
    return Part(
        source=source,
        documents=count,
        tokens=sum(lengths),
        longest=max(lengths),
        lengths=counts_of(np.array(lengths)).buckets(),
        bins=(StoredFile.of(root, f"{name}.bin"),),
        idx=StoredFile.of(root, f"{name}.idx"),
    )


@pytest.fixture(scope="session")
def two_sources(tmp_path_factory: pytest.TempPathFactory, shared_store: Manifest) -> Manifest:
    root = tmp_path_factory.mktemp("two sources")
    splits = {
        split: Split(
            parts=tuple(
                part(root, source, split, count, seed)
                for seed, (source, count) in enumerate({"web": many, "books": many // 4}.items())
            )
        )
        for split, many in (("train", 400), ("heldout", 20))
    }
    names = tuple(SourceFacts(name=name, kind="documents", origin=name) for name in LENGTHS)
    tokenizer = replace(shared_store.tokenizer, eod_id=EOD)
    return replace(
        shared_store, root=root, sources=names, train=splits["train"],
        heldout=splits["heldout"], tokenizer=tokenizer, blocks=None,
    )  # fmt: skip
