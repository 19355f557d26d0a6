# SPDX-License-Identifier: Apache-2.0
"""Compare tokenizers on the same documents: tokens, exactness, speed, and what attention costs.

Attention's work grows with the square of a document's tokens, and the square is where tokenizers
differ most: one that needs 10% more tokens makes attention within documents 21% more expensive. So
the sum of squares over the sample's documents is counted, not the square of an average.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from data.readers import SourceError
from data.sources import documents, kind_of
from data.tokenization.tokenizer import DocumentTokenizer, load

SAMPLE_BYTES = 16 * 2**20
WARM_UP_BYTES = 2**18
"""Text that is tokenized before the time is taken: it starts the threads and fills caches."""
OF_LOGITS = 4
"""Bytes of a logit: losses are computed in fp32."""
OF_WEIGHTS = 2
"""Bytes of a weight in bf16, without gradients and optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What a tokenizer makes of the sample."""

    name: str
    vocab_size: int
    tokens: int
    """With one for the end of each document."""
    tokens_per_document: float
    bytes_per_token: float
    squared_tokens: int
    """Sum over documents of the square of their tokens."""
    changed_documents: int
    """Documents that differ after encoding and decoding."""
    seconds: float
    """Of encoding, on all cores."""
    megabytes_per_second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The parts of a model that the vocabulary and attention cost."""

    hidden: int
    tied_embeddings: bool = False
    layers: int | None = None
    attention_width: int | None = None
    """Heads times the size of a head."""

    def vocabulary_bytes(self, vocab_size: int) -> int:
        """Return the bytes of the embedding and of the head, one matrix if they are tied."""
        return vocab_size * self.hidden * OF_WEIGHTS * (1 if self.tied_embeddings else 2)

    def attention_flops(self, squared_tokens: int) -> int | None:
        """Return the FLOPs of causal attention within documents, forward and backward.

        Per layer and document of n tokens: two products of n^2 / 2 pairs forward, twice that
        backward, at two FLOPs for each of the width, so 6 n^2 width.
        """
        if self.layers is None or self.attention_width is None:
            return None
        return 6 * self.layers * self.attention_width * squared_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Several tokenizers on one sample."""

    source: str
    documents: int
    bytes: int
    cores: int
    tokenizers: tuple[Figures, ...]


def compare(
    names: Sequence[str],
    source: str | None,
    *,
    text_key: str = "text",
    skip_broken: bool = False,
    sample_bytes: int = SAMPLE_BYTES,
) -> Comparison:
    """Tokenize the first documents of a source with each tokenizer.

    Args:
        names: folders, names on the hub, or stores for their tokenizers.
        source: see `data.sources`; not synthetic documents.
        sample_bytes: text to read; the document that reaches it is the last, and is whole.

    Raises:
        ValueError: for a source or a tokenizer that cannot be used.
    """
    if kind_of(source) == "synthetic":
        raise SourceError(
            f"--data {source} has its length in tokens of one tokenizer, so that it compares none; "
            "name documents or repositories:PATH"
        )
    texts, size = [], 0
    for text, _ in documents(source, text_key=text_key, skip_broken=skip_broken):
        texts.append(text)
        size += len(text.encode())
        if size >= sample_bytes:
            break
    tokenizers = [load(name) for name in names]
    return Comparison(
        source=source or "the Python standard library",
        documents=len(texts),
        bytes=size,
        cores=os.cpu_count() or 1,
        tokenizers=tuple(_figures(one, texts, size) for one in tokenizers),
    )


def _figures(tokenizer: DocumentTokenizer, texts: Sequence[str], size: int) -> Figures:
    tokenizer.encode_documents([texts[0][:WARM_UP_BYTES]])
    began = time.perf_counter()
    encoded = tokenizer.encode_documents(texts)
    seconds = time.perf_counter() - began
    lengths = [len(ids) + 1 for ids in encoded]
    changed = sum(
        tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False) != text
        for ids, text in zip(encoded, texts, strict=True)
    )
    return Figures(
        name=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        tokens=sum(lengths),
        tokens_per_document=sum(lengths) / len(lengths),
        bytes_per_token=size / sum(lengths),
        squared_tokens=sum(length * length for length in lengths),
        changed_documents=changed,
        seconds=seconds,
        megabytes_per_second=size / seconds / 1e6,
    )


def as_rows(compared: Comparison, shape: Shape, seq_length: int) -> list[dict[str, object]]:
    """Return the figures of each tokenizer with what they cost in a model of this shape."""
    first = compared.tokenizers[0]
    return [
        {
            "name": one.name,
            "vocab_tokens": one.vocab_size,
            "tokens": one.tokens,
            "tokens_per_document": one.tokens_per_document,
            "bytes_per_token": one.bytes_per_token,
            "embedding_and_head_bytes": shape.vocabulary_bytes(one.vocab_size),
            "logits_bytes": one.vocab_size * OF_LOGITS * seq_length,
            "attention_flops": shape.attention_flops(one.squared_tokens),
            "attention_ratio": one.squared_tokens / first.squared_tokens,
            "changed_documents": one.changed_documents,
            "megabytes_per_second": one.megabytes_per_second,
        }
        for one in compared.tokenizers
    ]
