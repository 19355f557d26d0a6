# SPDX-License-Identifier: Apache-2.0
"""Figures of a comparison equal those of each tokenizer by itself."""

from pathlib import Path

import numpy as np
import pytest

from data.prepare import HELDOUT_FRACTION, content_hash, prepare
from data.readers import SourceError
from data.tokenization.tokenizer import DocumentTokenizer, train
from data.tokenizer_comparison import QUANTILES, Sample, compare, sample


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer: DocumentTokenizer, texts: list[str]) -> list[str]:
    folder = tmp_path_factory.mktemp("tokenizers")
    tokenizer.save(folder / "small")
    train(texts, 300).save(folder / "smaller")
    return [str(folder / name) for name in ("small", "smaller")]


@pytest.fixture(scope="module")
def source(tmp_path_factory, texts: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text)
    return folder


def sampled(source: Path | str, most_bytes: int = 2**24) -> Sample:
    return sample(str(source), text_key="text", skip_broken=False, most_bytes=most_bytes)


def test_the_sample_is_what_prepare_holds_out(source: Path, tmp_path: Path, texts) -> None:
    heldout = [text for text in texts if content_hash(text, 0) < HELDOUT_FRACTION]
    found = sampled(source)
    assert (found.heldout, list(found.texts)) == (True, heldout)
    manifest = prepare(str(source), tmp_path / "store", vocab_size=300)
    assert manifest.split("heldout").documents == len(heldout)
    first, second = (len(text.encode()) for text in heldout[:2])
    assert sampled(source, first + 1).bytes == first + second


def test_a_source_without_held_out_documents_is_taken_from_the_first_on(tmp_path: Path) -> None:
    text = next(f"text {n}" for n in range(99) if content_hash(f"text {n}", 0) >= HELDOUT_FRACTION)
    (tmp_path / "only.txt").write_text(text)
    assert sampled(tmp_path) == Sample(texts=(text,), heldout=False)


def test_tokens_and_costs_are_counted_document_by_document(
    folders: list[str], source: Path, tokenizer: DocumentTokenizer
) -> None:
    documents = sampled(source)
    small, smaller = compare(folders, documents)
    lengths = [len(ids) + 1 for ids in tokenizer.encode_documents(documents.texts)]
    assert small.tokens == sum(lengths) < smaller.tokens
    assert small.tokens_per_document == pytest.approx(sum(lengths) / len(lengths))
    assert small.tokens_per_document_quantiles == pytest.approx(np.quantile(lengths, QUANTILES))
    assert small.longest_document_tokens == max(lengths)
    assert small.bytes_per_token == pytest.approx(documents.bytes / sum(lengths))
    assert small.vocabulary_bytes(8, tied=False) == 2 * small.vocab_tokens * 8 * 2
    assert small.vocabulary_bytes(8, tied=True) == small.vocab_tokens * 8 * 2
    assert small.logits_bytes(1_000) == small.vocab_tokens * 4 * 1_000


def test_repositories_are_compared_and_synthetic_documents_are_not(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.py").write_text("a = 1\n" * 50)
    assert len(sampled(f"repositories:{tmp_path}").texts) == 1
    with pytest.raises(SourceError, match="has its length in tokens of one tokenizer"):
        sampled("synthetic:retrieval")
