# SPDX-License-Identifier: Apache-2.0
"""Compare tokenizers on the same documents: tokens of a document, and cost of the vocabulary.

The documents are the held-out slice of a source: those that `longhaul prepare` keeps for evaluation
unless told otherwise, so that a tokenizer which it trained on the source has not seen them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.prepare import HELDOUT_FRACTION, content_hash
from data.readers import SourceError
from data.sources import documents, kind_of
from data.tokenization.tokenizer import DocumentTokenizer, load

QUANTILES = (0.1, 0.5, 0.9, 0.99)
OF_LOGITS = 4
"""Bytes of a logit: losses are computed in fp32."""
OF_WEIGHTS = 2
"""Bytes of a weight in bf16, without gradients and optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The documents that tokenizers are compared on."""

    texts: tuple[str, ...]
    heldout: bool
    """Whether they are the held-out slice; False for a source too small to have one."""

    @property
    def bytes(self) -> int:
        """Bytes of all texts in UTF-8."""
        return sum(len(text.encode()) for text in self.texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What a tokenizer makes of the documents, one token for the end of each included."""

    name: str
    vocab_tokens: int
    tokens: int
    tokens_per_document: float
    tokens_per_document_quantiles: tuple[float, ...]
    """At `QUANTILES`."""
    longest_document_tokens: int
    bytes_per_token: float

    def vocabulary_bytes(self, hidden: int, *, tied: bool) -> int:
        """Return the bytes of the embedding and of the head, one matrix if they are tied."""
        return self.vocab_tokens * hidden * OF_WEIGHTS * (1 if tied else 2)

    def logits_bytes(self, seq_length: int) -> int:
        """Return the bytes of the logits of a sequence."""
        return self.vocab_tokens * OF_LOGITS * seq_length


def sample(source: str | None, *, text_key: str, skip_broken: bool, most_bytes: int) -> Sample:
    """Return the first held-out documents of a source; the last is whole and reaches the bytes.

    A source without held-out documents has its first documents taken. Raises SourceError for
    synthetic documents, and for a source that cannot be read.
    """
    if kind_of(source) == "synthetic":
        raise SourceError(
            f"--text {source} has its length in tokens of one tokenizer, so that it compares none; "
            "name documents or repositories:PATH"
        )
    for heldout in (True, False):
        texts, size = [], 0
        for text, _ in documents(source, text_key=text_key, skip_broken=skip_broken):
            if heldout and content_hash(text, 0) >= HELDOUT_FRACTION:
                continue
            texts.append(text)
            size += len(text.encode())
            if size >= most_bytes:
                break
        if texts:
            break
    return Sample(texts=tuple(texts), heldout=heldout)


def compare(names: Sequence[str], sample: Sample) -> list[Figures]:
    """Tokenize a sample with each tokenizer: a folder, a name on the hub, or a store for its own.

    Raises ValueError for a tokenizer that cannot be used.
    """
    return [_figures(load(name), sample) for name in names]


def _figures(tokenizer: DocumentTokenizer, sample: Sample) -> Figures:
    lengths = np.array([len(ids) + 1 for ids in tokenizer.encode_documents(sample.texts)])
    return Figures(
        name=tokenizer.name,
        vocab_tokens=tokenizer.vocab_size,
        tokens=int(lengths.sum()),
        tokens_per_document=float(lengths.mean()),
        tokens_per_document_quantiles=tuple(np.quantile(lengths, QUANTILES).tolist()),
        longest_document_tokens=int(lengths.max()),
        bytes_per_token=sample.bytes / int(lengths.sum()),
    )
