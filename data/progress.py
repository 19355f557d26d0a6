# SPDX-License-Identifier: Apache-2.0
"""Progress on stderr: a bar if stderr is a terminal, otherwise a plain line now and then."""

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

SECONDS_BETWEEN_LINES = 10.0


class Advance(Protocol):
    """Receives the progress: bytes of text, documents, tokens."""

    def __call__(self, done_bytes: int, documents: int, tokens: int) -> None:
        """Show it."""


def say(text: str) -> None:
    """Write one line to stderr, except with `--quiet`."""
    if _is_quiet():
        return
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress(title: str, total_bytes: int | None) -> Iterator[Advance]:
    """Yield a function that shows the progress; `total_bytes` is None if unknown."""
    console = Console(stderr=True, quiet=_is_quiet())
    if not console.is_terminal:
        yield _lines(title, total_bytes)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total_bytes, state="")

        def advance(done_bytes: int, documents: int, tokens: int) -> None:
            state = _state(done_bytes, total_bytes, documents, tokens)
            bar.update(task, completed=done_bytes, state=state)

        yield advance


def _is_quiet() -> bool:
    """Return whether `longhaul --quiet` has set the level of its logger."""
    return logging.getLogger("longhaul").level > logging.INFO


def _lines(title: str, total_bytes: int | None) -> Advance:
    last = time.monotonic()

    def advance(done_bytes: int, documents: int, tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            say(f"{title}: {_state(done_bytes, total_bytes, documents, tokens)}")

    return advance


def _state(done_bytes: int, total_bytes: int | None, documents: int, tokens: int) -> str:
    size = f"{done_bytes / 2**20:,.1f} MiB"
    if total_bytes:
        size += f" of {total_bytes / 2**20:,.1f} ({min(done_bytes / total_bytes, 1):.0%})"
    return f"{size}, {documents:,} documents, {tokens:,} tokens"


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Suppress warnings, and log lines up to that level, of imports in the block."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
