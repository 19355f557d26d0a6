# SPDX-License-Identifier: Apache-2.0
"""Documents and questions of SQuAD 2.0 and HotpotQA, as RULER reads them (`qa.py`).

    squad.json      dev-v2.0: a question needs one paragraph, the others of its article are near
    hotpotqa.json   hotpot_dev_distractor_v1: a question needs all of its ten titled paragraphs

Sample `n` of a file is about question `n`, whatever the seed, as in RULER.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eval.ruler.length import RulerError
from eval.ruler.library import Question

BROKEN = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""Errors of reading a file that has another form."""


class PublishedLibrary:
    """The documents of a file, in alphabetical order, and its questions in the file's."""

    def __init__(self, texts: list[str], questions: list[Question], name: str) -> None:
        """Take what a reader has read; `name` is the file's, for a message."""
        self._texts, self._questions, self._name = texts, questions, name

    def documents(self, wanted: int) -> int:
        """Return the number of documents."""
        return len(self._texts)

    def document(self, number: int) -> str:
        """Return the text of a document."""
        return self._texts[number]

    def question(self, number: int, documents: int, seed: str) -> Question:
        """Return a question of the file."""
        if number >= len(self._questions):
            raise RulerError(
                f"{self._name} has {len(self._questions):,} questions; ask for at most as many "
                "samples"
            )
        return self._questions[number]


def squad(path: Path) -> PublishedLibrary:
    """Read SQuAD 2.0; questions that are not answerable are left out."""
    content = read_json(path)
    try:
        articles = [article["paragraphs"] for article in content["data"]]
        texts, number = _numbered(part["context"] for parts in articles for part in parts)
        questions = []
        for parts in articles:
            of_article = [number[part["context"]] for part in parts]
            for part in parts:
                own = number[part["context"]]
                near = tuple(other for other in of_article if other != own)
                questions += [
                    Question(
                        one["question"],
                        tuple(each["text"] for each in one["answers"]),
                        (own,),
                        near,
                    )
                    for one in part["qas"]
                    if not one["is_impossible"] and one["answers"]
                ]
    except BROKEN as error:
        raise _other_form(path, "SQuAD 2.0's dev-v2.0.json", error) from None
    return _library(texts, questions, path)


def hotpot(path: Path) -> PublishedLibrary:
    """Read HotpotQA's distractor set."""
    content = read_json(path)
    try:
        of_question = [
            [f"{title}\n{''.join(lines)}" for title, lines in one["context"]] for one in content
        ]
        texts, number = _numbered(text for own in of_question for text in own)
        questions = [
            Question(one["question"], (one["answer"],), tuple(number[text] for text in own))
            for one, own in zip(content, of_question, strict=True)
        ]
    except BROKEN as error:
        raise _other_form(path, "HotpotQA's hotpot_dev_distractor_v1.json", error) from None
    return _library(texts, questions, path)


def essays(path: Path) -> str:
    """Read the essays that RULER hides needles in."""
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("text"), str):
        raise RulerError(f'{path} is not the file that RULER writes: expected {{"text": "..."}}')
    text: str = content["text"]
    if not text.strip():
        raise RulerError(f"{path} has an empty text; write it again with RULER's script")
    return text


def read_json(path: Path) -> Any:
    """Return the content of a JSON file of any size."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RulerError(f"{path} is not JSON ({str(error)[:100]}); download it again") from None


def _library(texts: list[str], questions: list[Question], path: Path) -> PublishedLibrary:
    if not texts or not questions:
        raise RulerError(f"{path} has no documents with questions; write it again")
    return PublishedLibrary(texts, questions, str(path))


def _numbered(texts: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    different = sorted(set(texts))
    return different, {text: number for number, text in enumerate(different)}


def _other_form(path: Path, expected: str, error: Exception) -> RulerError:
    return RulerError(f"{path} is not {expected} ({type(error).__name__}: {str(error)[:60]})")
