# SPDX-License-Identifier: Apache-2.0
"""Documents with questions about them: what the two question-answering tasks draw from."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its answers, and the documents that it is about."""

    query: str
    outputs: tuple[str, ...]
    """Answers, each of them right."""
    needed: tuple[int, ...]
    """Documents that every prompt has."""
    near: tuple[int, ...] = ()
    """Documents on the same subject, which are added before any other."""


class Library(Protocol):
    """Documents by their numbers, and questions by theirs."""

    def documents(self, wanted: int) -> int:
        """Return how many documents there are; made-up ones as many as are wanted."""

    def document(self, number: int) -> str:
        """Return the text of a document."""

    def question(self, number: int, documents: int, seed: str) -> Question:
        """Return a question about the first `documents` documents.

        Raises:
            RulerError: if there are fewer questions.
        """
