# SPDX-License-Identifier: Apache-2.0
"""Announce results of a long job as soon as their files are written."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from longhaul.terminal.messages import is_quiet

SECONDS = 1.0
"""Between two looks at the files."""


@contextmanager
def announcing(console: Console, results: Mapping[str, Path], did: str) -> Iterator[None]:
    """Print `NAME DID (1 of 3)` when the file of a name is written during the block."""
    before = {name: _written(path) for name, path in results.items()}
    left = dict(results)
    done = threading.Event()

    def look() -> None:
        for name, path in list(left.items()):
            if _written(path) != before[name]:
                del left[name]
                count = f"{len(results) - len(left)} of {len(results)}"
                console.print(Text(f"{name} {did} ({count})"), soft_wrap=True)

    def watch() -> None:
        while not done.wait(SECONDS):
            look()

    if is_quiet() or len(results) < 2:
        yield
        return
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        look()


def _written(path: Path) -> int | None:
    """Return when a file was last written, in nanoseconds; None if there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
