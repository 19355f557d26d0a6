# SPDX-License-Identifier: Apache-2.0
"""What the terminal shows while large libraries load and jobs run: a line, not their pages."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console


@contextmanager
def output_to(path: Path) -> Iterator[Console]:
    """Send everything written to stdout and stderr into a file; yield a console that still shows.

    The redirection is of file descriptors, so C++ and child processes are covered too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.dup2(file, 1)
        os.dup2(file, 2)
        with os.fdopen(os.dup(kept[1]), "w") as shown:
            yield Console(file=shown)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for descriptor in (*kept, file):
            os.close(descriptor)


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Say what is being loaded, and hold back what it prints meanwhile unless it fails."""
    with tempfile.TemporaryDirectory() as folder:
        held = Path(folder) / "output"
        try:
            with output_to(held) as console:
                if console.is_terminal:
                    with console.status(f"loading {what}"):
                        yield
                else:
                    console.print(f"loading {what}")
                    yield
        except ImportError:
            sys.stderr.write(held.read_text())
            raise
