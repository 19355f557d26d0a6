# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from data.adoption.adopt import adopt
from data.adoption.checks import HeldOut
from data.adoption.pairs import Named
from data.store import Manifest
from data.tokenization.tokenizer import DocumentTokenizer


def write_pair(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype=np.uint16) -> Path:
    """Write documents, each of one or more sequences of ids, by Megatron's own builder."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype)
    for sequences in documents:
        ids = torch.tensor([token for sequence in sequences for token in sequence])
        builder.add_document(ids, [len(sequence) for sequence in sequences])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: DocumentTokenizer) -> str:
    folder = tmp_path_factory.mktemp("tokenizers") / "bpe"
    tokenizer.save(folder)
    return str(folder)


@pytest.fixture(scope="session")
def encoded(tokenizer: DocumentTokenizer, texts: list[str]) -> list[list[int]]:
    """The texts as ids, each ended by the token that ends a document."""
    return [[*ids.tolist(), tokenizer.eod_id] for ids in tokenizer.encode_documents(texts)]


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory, encoded: list[list[int]]) -> Path:
    """The prefix of a pair in a folder with a blank; every third document has two sequences."""
    prefix = tmp_path_factory.mktemp("other tool") / "my data" / "web_text_document"
    documents = [
        [ids[:10], ids[10:]] if number % 3 == 0 else [ids] for number, ids in enumerate(encoded)
    ]
    return write_pair(prefix, documents)


@pytest.fixture
def adopted(tmp_path: Path, tokenizer_folder: str) -> Callable[..., Manifest]:
    """Adopt paths, or `Named` ones, as the store `tmp_path / "store"`."""

    def make(*paths: Path | Named, **options) -> Manifest:
        named = [path if isinstance(path, Named) else Named(path=path) for path in paths]
        given = {"tokenizer": tokenizer_folder, "heldout": HeldOut(), **options}
        return adopt(named, tmp_path / "store", **given)

    return make
