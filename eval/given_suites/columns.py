# SPDX-License-Identifier: Apache-2.0
"""Columns of the published parquet files.

    openai/mrcr         prompt (chat messages as JSON), answer, random_string_to_prepend, n_needles
    openai/graphwalks   prompt (text of one user message), answer_nodes (maybe none), problem_type

MRCR's tasks are named by the needles (`mrcr_2needle`), those of GraphWalks by the operation
(`graphwalks_bfs`, `graphwalks_parents`).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eval.given_suites.metrics import GRAPHWALKS, MRCR
from eval.ruler.length import RulerError
from recipes.spec.suggest import did_you_mean

Message = dict[str, str]
"""A chat message: `role` and `content`."""
ROWS_AT_ONCE = 16
"""A prompt of 1M tokens is some 4 MB of text."""
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of a file."""

    task: str
    messages: list[Message]
    outputs: tuple[str, ...]
    """What the suite's metric compares a response with."""
    expected: str
    """A response that scores 1."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A published suite: its name here and on the Hugging Face hub, and how a row is read."""

    name: str
    hub: str
    columns: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Row]

    def download(self, folder: Path) -> str:
        """Return the command that writes the folder, for a message."""
        return f"`hf download {self.hub} --repo-type dataset --local-dir {folder}`"


def _mrcr(row: Mapping[str, Any]) -> Row:
    messages = json.loads(row["prompt"])
    if not isinstance(messages, list) or not all(
        isinstance(one, dict) and one.get("role") in ROLES and isinstance(one.get("content"), str)
        for one in messages
    ):
        raise ValueError("prompt is not a list of chat messages")
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("the last message of prompt is not the user's")
    prefix, answer = _text(row, "random_string_to_prepend"), _text(row, "answer")
    if not prefix or not answer.startswith(prefix):
        raise ValueError("answer does not begin with random_string_to_prepend")
    return Row(
        task=f"{MRCR}_{int(row['n_needles'])}needle",
        messages=[{"role": one["role"], "content": one["content"]} for one in messages],
        outputs=(prefix, answer),
        expected=answer,
    )


def _graphwalks(row: Mapping[str, Any]) -> Row:
    nodes = row["answer_nodes"]
    if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
        raise ValueError("answer_nodes is not a list of texts")
    kind = _text(row, "problem_type").lower()
    if not re.fullmatch(r"\w+", kind, re.ASCII):
        raise ValueError(f"problem_type is {kind!r}; expected bfs or parents")
    return Row(
        task=f"{GRAPHWALKS}_{kind}",
        messages=[{"role": "user", "content": _text(row, "prompt")}],
        outputs=tuple(nodes),
        expected=f"Final Answer: [{', '.join(nodes)}]",
    )


def _text(row: Mapping[str, Any], column: str) -> str:
    if not isinstance(row[column], str):
        raise ValueError(f"{column} is not a text")
    text: str = row[column]
    return text


SUITES = {
    MRCR: Suite(
        MRCR,
        "openai/mrcr",
        ("prompt", "answer", "random_string_to_prepend", "n_needles"),
        _mrcr,
    ),
    GRAPHWALKS: Suite(
        GRAPHWALKS, "openai/graphwalks", ("prompt", "answer_nodes", "problem_type"), _graphwalks
    ),
}
"""The suites that can be converted, by name."""


def suite_named(name: str) -> Suite:
    """Return a suite by its name; raise RulerError for an unknown one, with the nearest."""
    if name not in SUITES:
        raise RulerError(f"no given suite is called {name!r}; {did_you_mean(name, [*SUITES])}")
    return SUITES[name]


def parquet_files(folder: Path, suite: Suite) -> list[Path]:
    """Return the parquet files of a folder and its subfolders, in the order of their names.

    Raises:
        RulerError: if there are none, or if one of them lacks a column of the suite.
    """
    if not folder.is_dir():
        raise RulerError(
            f"{folder} is not a folder; {suite.download(folder)} writes {suite.hub} there"
        )
    files = sorted(folder.rglob("*.parquet"))
    if not files:
        raise RulerError(
            f"{folder} has no .parquet file; {suite.download(folder)} writes {suite.hub} there"
        )
    for path in files:
        try:
            there = pq.read_schema(path).names
        except (pa.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())[:100]
            raise RulerError(
                f"{path} cannot be read as parquet ({reason}); {suite.download(folder)} writes "
                "it again"
            ) from None
        lacking = [name for name in suite.columns if name not in there]
        if lacking:
            raise RulerError(
                f"{path} lacks the column {lacking[0]} of {suite.hub}; it has {', '.join(there)}. "
                f"{suite.download(folder)} writes files that have it"
            )
    return files


def rows(path: Path, suite: Suite) -> Iterator[Row]:
    """Yield the rows of a file in its order.

    Raises:
        RulerError: for a row whose values are not those that the suite publishes.
    """
    number = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=list(suite.columns)):
            for content in batch.to_pylist():
                number += 1
                try:
                    yield suite.read(content)
                except (ValueError, TypeError) as error:
                    raise RulerError(
                        f"row {number:,} of {path} is not one of {suite.hub}: {error}"
                    ) from None
