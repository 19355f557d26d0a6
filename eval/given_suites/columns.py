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

from eval.given_suites.row import Row
from eval.ruler.given_metrics import GRAPHWALKS, MRCR
from eval.ruler.length import RulerError

ROWS_AT_ONCE = 16
"""A prompt of 1M tokens is some 4 MB of text."""
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class ParquetSuite:
    """A suite of parquet files: its name here and on the hub, and how a row is read."""

    name: str
    hub: str
    columns: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Row]

    def download(self, folder: Path) -> str:
        """Return the command that writes the folder, for a message."""
        return f"`hf download {self.hub} --repo-type dataset --local-dir {folder}`"

    def files(self, folder: Path) -> list[Path]:
        """Return the files with samples; raise RulerError if there are none."""
        return parquet_files(folder, self)

    def sources(self, folder: Path) -> list[Path]:
        """Return all files that are read."""
        return self.files(folder)

    def rows(self, path: Path) -> Iterator[Row]:
        """Yield the rows of a file in its order; raise RulerError for one of another form."""
        return rows(path, self)


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


PUBLISHED = (
    ParquetSuite(
        MRCR,
        "openai/mrcr",
        ("prompt", "answer", "random_string_to_prepend", "n_needles"),
        _mrcr,
    ),
    ParquetSuite(
        GRAPHWALKS, "openai/graphwalks", ("prompt", "answer_nodes", "problem_type"), _graphwalks
    ),
)
"""The suites that are published as parquet files."""


def parquet_files(folder: Path, suite: ParquetSuite) -> list[Path]:
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


def rows(path: Path, suite: ParquetSuite) -> Iterator[Row]:
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
