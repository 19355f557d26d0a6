# SPDX-License-Identifier: Apache-2.0
"""The suites that can be converted, by name."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from eval.given_suites import helmet
from eval.given_suites.columns import PUBLISHED
from eval.given_suites.row import Row
from eval.ruler.length import RulerError
from recipes.spec.suggest import did_you_mean


class Suite(Protocol):
    """A published suite: its name here and on the Hugging Face hub, and how files are read."""

    @property
    def name(self) -> str:
        """Its name here."""

    @property
    def hub(self) -> str:
        """Its name on the hub."""

    def download(self, folder: Path, /) -> str:
        """Return the command that writes the folder, for a message."""

    def files(self, folder: Path) -> list[Path]:
        """Return the files with samples; raise RulerError if there are none."""

    def sources(self, folder: Path) -> list[Path]:
        """Return all files that are read."""

    def rows(self, path: Path) -> Iterator[Row | str]:
        """Yield the rows of a file, or why one is left out; raise RulerError for a broken one."""


SUITES: Mapping[str, Suite] = {
    suite.name: suite for suite in (*PUBLISHED, helmet.RECALL, helmet.RAG, helmet.RERANK)
}


def suite_named(name: str) -> Suite:
    """Return a suite by its name; raise RulerError for an unknown one, with the nearest."""
    if name in helmet.NOT_IN_FILES:
        raise RulerError(
            f"{name} is not converted: HELMET takes its data from {helmet.NOT_IN_FILES[name]} on "
            "the Hugging Face hub, not from its own files; write a task over local copies of them "
            "for `longhaul evaluate --suite NAME --include-path FOLDER`"
        )
    if name not in SUITES:
        raise RulerError(f"no given suite is called {name!r}; {did_you_mean(name, [*SUITES])}")
    return SUITES[name]
