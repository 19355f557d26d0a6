# SPDX-License-Identifier: Apache-2.0
"""Tokens of prompts and of parts of them, by the model's own tokenizer.

A prompt is encoded as a document is: text never becomes a special token. The special tokens that
the tokenizer puts before a text (a beginning of sequence) are part of a prompt and are counted.
"""

from collections.abc import Sequence

from data.tokenization.tokenizer import DocumentTokenizer

TAIL = 48
"""Characters of a prompt's end with which its continuation is encoded."""


class Tokens:
    """A tokenizer with the counts of short texts that it has seen."""

    def __init__(self, tokenizer: DocumentTokenizer) -> None:
        """Take the special tokens that come before a text."""
        self.tokenizer = tokenizer
        self.first = tokenizer.first_ids
        self._counts: dict[str, int] = {}

    def of_prompts(self, prompts: Sequence[str]) -> list[int]:
        """Return the exact number of tokens of whole prompts, encoded on all cores."""
        encoded = self.tokenizer.encode_documents(prompts)
        return [len(self.first) + int(ids.size) for ids in encoded]

    def of_parts(self, parts: Sequence[str]) -> list[int]:
        """Return the tokens of parts, each encoded once and alone; their sum is an estimate."""
        new = [part for part in dict.fromkeys(parts) if part not in self._counts]
        for part, ids in zip(new, self.tokenizer.encode_documents(new), strict=True):
            self._counts[part] = int(ids.size)
        return [self._counts[part] for part in parts]

    def of_part(self, part: str) -> int:
        """Return the tokens of one part."""
        return self.of_parts([part])[0]

    def prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt."""
        return [*self.first, *self._encoded(text)]

    def continuation(self, prompt: str, answer: str) -> list[int]:
        """Return the token ids of an answer as they follow those of `prompt`.

        A tokenizer may join the end of the prompt and the beginning of the answer to one token; the
        answer is then encoded alone, since a model only adds tokens.
        """
        tail = prompt[-TAIL:]
        before, joined = self._encoded(tail), self._encoded(tail + answer)
        if joined[: len(before)] == before:
            return joined[len(before) :]
        return self._encoded(answer)

    def _encoded(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode_documents([text])[0]]
