# SPDX-License-Identifier: Apache-2.0
"""Turn documents into token ids; all that a process needs to tokenize, without transformers.

Three rules: the text of a document never becomes a special token, so "<|endoftext|>" written in a
document is encoded as the characters it consists of; a long text is encoded in pieces
(`data.tokenization.text_chunks`); and a document begins with the tokens that the tokenizer's own
post-processor puts first, such as the `<s>` or `<|begin_of_text|>` of Llama, Mistral and Gemma, as
a prompt to the model does. `encode_documents` leaves them to whoever writes a document.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from data.files.whole import write_text
from data.tokenization.text_chunks import PIECE_CHARS, pieces, pieces_of

BATCH_CHARS = 2**22
"""Characters tokenized at once; the backend holds some hundred bytes a token until it is done."""
MOST_OF_16_BITS = 65_500
"""Megatron's bound: a vocabulary of fewer tokens is stored in two bytes a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """A tokenizer for documents: no special token from text, no truncation, no padding."""

    backend: Tokenizer
    eod_id: int
    vocab_size: int
    """One more than the largest token id."""
    first_ids: tuple[int, ...] = ()
    """Tokens with which a document begins."""

    @classmethod
    def load(cls, path: Path) -> "Encoder":
        """Read what `write` wrote."""
        facts = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            backend=plain(Tokenizer.from_str(facts["backend"])),
            eod_id=facts["eod_id"],
            vocab_size=facts["vocab_size"],
            first_ids=tuple(facts.get("first_ids", ())),
        )

    def write(self, path: Path) -> None:
        """Write what `load` reads."""
        write_text(path, json.dumps(self._facts() | {"first_ids": self.first_ids}))

    @property
    def sha256(self) -> str:
        """Identity of the encoder: the same give the same ids, under one release of tokenizers.

        What comes first is in the backend's own definition.
        """
        return hashlib.sha256(json.dumps(self._facts()).encode()).hexdigest()

    @property
    def token_type(self) -> Any:
        """The NumPy type in which Megatron stores the ids."""
        return np.uint16 if self.vocab_size < MOST_OF_16_BITS else np.int32

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return the token ids of each text, encoded on all cores."""
        return self._encode_in_pieces(texts, PIECE_CHARS)

    def encode_long(self, chunks: Iterable[str]) -> Iterator[NDArray[np.int32]]:
        """Yield the ids of a text that arrives in chunks, those of `encode_documents`."""
        batch: list[str] = []
        for piece in pieces_of(chunks, self._same_apart):
            batch.append(piece)
            if len(batch) * PIECE_CHARS >= BATCH_CHARS:
                yield from self._encode(batch)
                batch = []
        yield from self._encode(batch)

    def count(self, text: str) -> int:
        """Return the tokens of a text, without those at the ends of a document."""
        return int(self.encode_documents([text])[0].size)

    def _facts(self) -> dict[str, Any]:
        return {
            "backend": self.backend.to_str(),
            "eod_id": self.eod_id,
            "vocab_size": self.vocab_size,
        }

    def _encode_in_pieces(self, texts: Sequence[str], limit: int) -> list[NDArray[np.int32]]:
        parts = [list(pieces(text, self._same_apart, limit)) for text in texts]
        encodings = iter(self._encode([piece for pieces_of in parts for piece in pieces_of]))
        return [np.concatenate([next(encodings) for _ in pieces_of]) for pieces_of in parts]

    def _encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [
            np.array(encoding.ids, dtype=np.int32)
            for batch in _batches(texts)
            for encoding in self.backend.encode_batch_fast(batch, add_special_tokens=False)
        ]

    def _same_apart(self, left: str, right: str) -> bool:
        together, first, second = self._encode([left + right, left, right])
        return np.array_equal(together, np.concatenate([first, second]))


def plain(backend: Tokenizer) -> Tokenizer:
    """Set a backend to encode documents: no truncation, no padding, no special token from text."""
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def first_ids(backend: Tokenizer) -> tuple[int, ...]:
    """Return the special tokens that a tokenizer's post-processor puts before a text."""
    alone = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a").ids
    for at in range(len(whole) - len(alone) + 1):
        if whole[at : at + len(alone)] == alone:
            return tuple(whole[:at])
    return ()


def largest_id(encoder: Encoder) -> int:
    """Return the largest token id that a document can have.

    Special tokens are not among them, since no text becomes one, but for those at its ends.
    """
    added = encoder.backend.get_added_tokens_decoder()
    special = {number for number, token in added.items() if token.special}
    ends = {*encoder.first_ids, encoder.eod_id}
    return max(ends | (set(encoder.backend.get_vocab().values()) - special))


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        if batch and characters + len(text) > BATCH_CHARS:
            yield batch
            batch, characters = [], 0
        batch.append(text)
        characters += len(text)
    if batch:
        yield batch
