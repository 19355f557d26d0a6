# SPDX-License-Identifier: Apache-2.0
"""The parts of HELMET (arXiv 2410.02694) whose data are files: recall, RAG and re-ranking.

    json_kv/test_k1800_dep6.jsonl                   context, question, answer, demos
    kilt/nq-dev-multikilt_1000_k1000_dep6.jsonl     question, answers, ctxs (title, text), maybe id
    kilt/nq-train-multikilt_1000_k3_dep6.jsonl      examples, with few documents each
    kilt/popqa_test_1000_k1000_dep6.jsonl           and s_pop, how often the subject is read about
    msmarco/test_reranking_data_k1000_dep3.jsonl    qid, query, ctxs (id, text, label, maybe title)
    msmarco/test_reranking_data_k10_dep3.jsonl      examples

`k` is the number of documents or pairs. As in HELMET there are two examples before a question,
drawn by the question, and PopQA has the rare subjects only (s_pop below 1,000). The prompts are
worded here, with examples as turns of a conversation, so scores are not those of HELMET's prompts.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from eval.given_suites.row import Message, Row
from eval.ruler.given_metrics import (
    FIRST,
    HELMET_RAG,
    HELMET_RECALL,
    HELMET_RERANK,
    LABELLED,
)
from eval.ruler.length import RulerError

HUB = "princeton-nlp/HELMET"
EXAMPLES = 2
RARE = 1000
"""Values of s_pop below it are those of rare subjects."""
POPULAR = "popular subject"
"""Why a row of PopQA is left out."""
KEY = (
    "Below is a JSON object. Reply to each key with its value, and with nothing else, on one line."
)
QUESTION = (
    "Answer each question from the documents above it. Write nothing but the answer, in a few "
    "words, on one line."
)
QUERY = (
    "Rank the documents above each query by how well they answer it, the best one first. Write "
    f"the numbers of at least the {FIRST} best on one line, as in 3 > 1 > 2."
)

Fields = Mapping[str, Any]
"""A line of a file."""


@dataclass(frozen=True, slots=True)
class Part:
    """A data set: its task, its folder, and patterns of the names of its files."""

    task: str
    folder: str
    tests: str
    examples: str = ""


@dataclass(frozen=True, slots=True)
class Helmet:
    """A category of HELMET."""

    name: str
    parts: tuple[Part, ...]
    read: Callable[[Part, Fields, Sequence[Fields]], Row | str]
    """Returns the row of a line, given lines to take examples from; or why it is left out."""
    hub: str = HUB

    def download(self, _: Path) -> str:
        """Return the command that writes the files, for a message."""
        return f"`bash scripts/download_data.sh` in a clone of github.com/{HUB}"

    def files(self, folder: Path) -> list[Path]:
        """Return the files with samples below a folder, or below its folder `data`.

        Raises:
            RulerError: if there are none, or those with their examples are missing.
        """
        found = []
        for part in self.parts:
            here = _place(folder, part)
            tests = [
                path
                for path in sorted(here.glob(part.tests))
                if not (part.examples and fnmatch(path.name, part.examples))
            ]
            if tests and part.examples and not any(here.glob(part.examples)):
                raise RulerError(
                    f"{here} has {tests[0].name}, but not its examples {part.examples}; "
                    f"{self.download(folder)} writes them, put them there"
                )
            found += tests
        if not found:
            part = self.parts[0]
            raise RulerError(
                f"{folder} has no {part.folder}/{part.tests}; {self.download(folder)} writes the "
                "folder data, which has it"
            )
        return found

    def sources(self, folder: Path) -> list[Path]:
        """Return all files that are read."""
        tests = self.files(folder)
        return tests + sorted({path for test in tests for path in self._examples(test)})

    def rows(self, path: Path) -> Iterator[Row | str]:
        """Yield the rows of a file in its order, or why one is left out.

        Raises:
            RulerError: for a line of another form.
        """
        part = self._part(path)
        examples = [fields for file in self._examples(path) for _, fields in _lines_kept(file)]
        for number, fields in _lines(path):
            try:
                yield self.read(part, fields, examples)
            except (KeyError, TypeError, ValueError) as error:
                reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
                raise RulerError(
                    f"line {number:,} of {path} is not one of {HUB}: {reason}"
                ) from None

    def _part(self, path: Path) -> Part:
        return next(
            part
            for part in self.parts
            if path.parent.name == part.folder and fnmatch(path.name, part.tests)
        )

    def _examples(self, path: Path) -> list[Path]:
        pattern = self._part(path).examples
        return sorted(path.parent.glob(pattern)) if pattern else []


def _recall(part: Part, fields: Fields, _: Sequence[Fields]) -> Row:
    pairs = [(_text(key), _text(value)) for key, value in fields["demos"][:EXAMPLES]]
    asked, answer = _text(fields["question"]), _text(fields["answer"])
    context = f"{KEY}\n\n{_text(fields['context'])}"
    messages = _conversation([(f"Key: {key}", value) for key, value in pairs], f"Key: {asked}")
    messages[0]["content"] = f"{context}\n\n{messages[0]['content']}"
    return Row(task=part.task, messages=messages, outputs=(answer,), expected=answer)


def _rag(part: Part, fields: Fields, examples: Sequence[Fields]) -> Row | str:
    if "s_pop" in fields:
        if float(fields["s_pop"]) >= RARE:
            return POPULAR
        examples = [each for each in examples if float(each["s_pop"]) < RARE]
    key = "id" if "id" in fields else "question"

    def asked(of: Fields) -> str:
        documents = [f"[{_text(one['title'])}]\n{_text(one['text'])}" for one in of["ctxs"]]
        return "\n\n".join([*documents, f"Question: {_text(of['question'])}"])

    answers = _answers(fields["answers"])
    drawn = _drawn(examples, fields, key)
    messages = _conversation(
        [(asked(each), _answers(each["answers"])[0]) for each in drawn], asked(fields)
    )
    messages[0]["content"] = f"{QUESTION}\n\n{messages[0]['content']}"
    return Row(task=part.task, messages=messages, outputs=answers, expected=answers[0])


def _rerank(part: Part, fields: Fields, examples: Sequence[Fields]) -> Row:
    def asked(of: Fields) -> str:
        documents = [
            f"[{_text(one['id'])}] {_text(one['title']) + ': ' if one.get('title') else ''}"
            f"{_text(one['text'])}"
            for one in of["ctxs"]
        ]
        return "\n\n".join([*documents, f"Query: {_text(of['query'])}"])

    def ranked(of: Fields, count: int | None = None) -> str:
        best = sorted(of["ctxs"], key=lambda one: -int(one["label"]))
        return " > ".join(_text(one["id"]) for one in best[:count])

    labels = tuple(f"{_text(one['id'])} {int(one['label'])}" for one in fields["ctxs"])
    if not all(LABELLED.fullmatch(label) for label in labels):
        raise ValueError("an id of ctxs is not a number")
    if not any(int(one["label"]) > 0 for one in fields["ctxs"]):
        raise ValueError("no document of ctxs has a label above 0")
    drawn = _drawn(examples, fields, "qid")
    messages = _conversation([(asked(each), ranked(each)) for each in drawn], asked(fields))
    messages[0]["content"] = f"{QUERY}\n\n{messages[0]['content']}"
    return Row(task=part.task, messages=messages, outputs=labels, expected=ranked(fields, FIRST))


def _conversation(examples: Sequence[tuple[str, str]], question: str) -> list[Message]:
    turns = [
        {"role": role, "content": content}
        for example in examples
        for role, content in zip(("user", "assistant"), example, strict=True)
    ]
    return [*turns, {"role": "user", "content": question}]


def _drawn(examples: Sequence[Fields], fields: Fields, key: str) -> list[Fields]:
    """Return the examples of a question: of other questions, and the same ones in every run."""
    others = {str(each[key]): each for each in examples if each[key] != fields[key]}
    if len(others) < EXAMPLES:
        raise ValueError(f"there are {len(others)} examples of other questions, not {EXAMPLES}")
    draw = random.Random(f"helmet {fields[key]}")
    return [others[name] for name in draw.sample(sorted(others), EXAMPLES)]


def _answers(stated: Any) -> tuple[str, ...]:
    """Return the answers of a list of texts, or of lists of texts."""
    lists = stated if isinstance(stated, list) else [stated]
    flat = [text for one in lists for text in (one if isinstance(one, list) else [one])]
    if not flat:
        raise ValueError("answers is empty")
    return tuple(_text(one) for one in flat)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{str(value)[:40]!r} is not a text")
    return value


def _place(folder: Path, part: Part) -> Path:
    """Return the folder of a data set: in the folder named, in its `data`, or the folder itself."""
    if folder.name == part.folder:
        return folder
    within = folder / "data" / part.folder
    return within if within.is_dir() else folder / part.folder


def _lines(path: Path) -> Iterator[tuple[int, Fields]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line.decode())
                if not isinstance(fields, dict):
                    raise ValueError
            except ValueError:
                raise RulerError(
                    f"line {number:,} of {path} is not a JSON object; the file is damaged, download"
                    " it again"
                ) from None
            yield number, fields


@cache
def _lines_kept(path: Path) -> list[tuple[int, Fields]]:
    """Return the lines of a file of examples, which several files of samples share."""
    return list(_lines(path))


RECALL = Helmet(HELMET_RECALL, (Part("json_kv", "json_kv", "test_k*_dep*.jsonl"),), _recall)
RAG = Helmet(
    HELMET_RAG,
    tuple(
        Part(f"kilt_{name}", "kilt", f"{tests}_k*_dep*.jsonl", f"{examples}_k3_dep*.jsonl")
        for name, tests, examples in (
            ("nq", "nq-dev-multikilt_1000", "nq-train-multikilt_1000"),
            ("triviaqa", "triviaqa-dev-multikilt_1000", "triviaqa-train-multikilt_1000"),
            ("hotpotqa", "hotpotqa-dev-multikilt_1000", "hotpotqa-train-multikilt_1000"),
            ("popqa_rare", "popqa_test_1000", "popqa_test_1000"),
        )
    ),
    _rag,
)
RERANK = Helmet(
    HELMET_RERANK,
    (
        Part(
            "msmarco_rerank", "msmarco", "test_reranking_data_k*_dep*.jsonl",
            "test_reranking_data_k10_dep*.jsonl",
        ),
    ),
    _rerank,
)  # fmt: skip
NOT_IN_FILES = {
    "helmet-icl": "CogComp/trec, PolyAI/banking77, clinc_oos and "
    "xingkunliuxtracta/nlu_evaluation_data",
    "helmet-longqa": "narrativeqa and xinrongzhang2022/InfiniteBench",
    "helmet-summ": "allenai/multi_lexsum and xinrongzhang2022/InfiniteBench",
}
"""Categories whose data HELMET takes from other data sets of the hub."""
