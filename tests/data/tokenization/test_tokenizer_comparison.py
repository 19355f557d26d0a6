# SPDX-License-Identifier: Apache-2.0
"""Figures of a comparison equal those of each tokenizer by itself."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from data.tokenization.tokenizer import DocumentTokenizer, train
from data.tokenization.tokenizer_comparison import Shape, as_rows, compare


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer: DocumentTokenizer, texts: list[str]) -> list[str]:
    """Two byte-level tokenizers, and one that writes every text in lower case."""
    folder = tmp_path_factory.mktemp("tokenizers")
    tokenizer.save(folder / "small")
    train(texts, 300).save(folder / "smaller")
    vocab = {character: at for at, character in enumerate(sorted(set("".join(texts).lower())))}
    lossy = Tokenizer(models.BPE(vocab={**vocab, "<eod>": len(vocab)}, merges=[]))
    lossy.normalizer = normalizers.Lowercase()
    PreTrainedTokenizerFast(tokenizer_object=lossy, eos_token="<eod>").save_pretrained(
        str(folder / "lossy")
    )
    return [str(folder / name) for name in ("small", "smaller", "lossy")]


@pytest.fixture(scope="module")
def source(tmp_path_factory, texts: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(texts[:20]):
        words = text if number % 4 else text.capitalize()
        (folder / f"{number:02d}.txt").write_text(words)
    return folder


def test_tokens_squares_and_round_trips_are_counted_document_by_document(
    folders: list[str], source: Path, tokenizer: DocumentTokenizer
) -> None:
    compared = compare(folders, str(source))
    texts = [file.read_text() for file in sorted(source.iterdir())]
    assert (compared.documents, compared.bytes) == (20, sum(map(len, texts)))
    small, smaller, lossy = compared.tokenizers
    lengths = [len(ids) + 1 for ids in tokenizer.encode_documents(texts)]
    assert small.tokens == sum(lengths)
    assert small.squared_tokens == sum(length**2 for length in lengths)
    assert smaller.tokens > small.tokens
    assert (small.changed_documents, smaller.changed_documents) == (0, 0)
    assert lossy.changed_documents >= sum(text != text.lower() for text in texts) == 5
    assert all(one.seconds > 0 for one in compared.tokenizers)


def test_a_sample_ends_with_the_document_that_fills_it(folders: list[str], source: Path) -> None:
    first, second = (len(file.read_text()) for file in sorted(source.iterdir())[:2])
    compared = compare(folders[:1], str(source), sample_bytes=first + 1)
    assert (compared.documents, compared.bytes) == (2, first + second)


def test_costs_are_those_of_the_shape_by_hand(folders: list[str], source: Path) -> None:
    compared = compare(folders[:2], str(source))
    small, smaller = compared.tokenizers
    shape = Shape(hidden=8, layers=3, attention_width=16)
    rows = as_rows(compared, shape, 1_000)
    assert rows[0]["embedding_and_head_bytes"] == 2 * small.vocab_size * 8 * 2
    assert rows[0]["logits_bytes"] == small.vocab_size * 4 * 1_000
    assert rows[0]["attention_flops"] == 6 * 3 * 16 * small.squared_tokens
    assert rows[1]["attention_ratio"] == smaller.squared_tokens / small.squared_tokens
    tied = as_rows(compared, Shape(hidden=8, tied_embeddings=True), 1_000)
    assert tied[0]["embedding_and_head_bytes"] == small.vocab_size * 8 * 2
    assert tied[0]["attention_flops"] is None


def test_repositories_are_compared_and_synthetic_documents_are_not(
    folders: list[str], tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.py").write_text("a = 1\n" * 50)
    assert compare(folders[:1], f"repositories:{tmp_path}").documents == 1
    with pytest.raises(ValueError, match="in tokens of one tokenizer, so that it compares none"):
        compare(folders[:1], "synthetic:retrieval,length=1K")
