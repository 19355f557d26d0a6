# SPDX-License-Identifier: Apache-2.0
"""What the terminal shows while large libraries load and jobs run: a line, not their pages."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

IN_A_PIPE = 120
"""Columns of text where no terminal says how many there are."""


def fitted(
    table: Callable[[Sequence[str]], Table], expendable: Sequence[str] = ()
) -> tuple[Console, Table, Sequence[str]]:
    """Return a console for text as it is, a table made for its width, and the columns left out.

    `table` makes it without the columns it is given: as few of the expendable ones, from the first
    on, as let it fit the terminal. In a pipe, where lines are searched, the console has the width
    of the whole table instead: a row is one line.
    """
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        whole = table(())
        console.width = max(IN_A_PIPE, _width(console, whole))
        return console, whole, ()
    tried = [(table(expendable[:count]), count) for count in range(len(expendable) + 1)]
    fitting = [made for made in tried if _width(console, made[0]) <= console.width]
    found, count = (fitting or tried[-1:])[0]
    return console, found, expendable[:count]


def _width(console: Console, table: Table) -> int:
    """Return the columns of text that a table takes where nothing limits it."""
    return Measurement.get(console, console.options.update(max_width=1_000), table).maximum


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
    from slurm.extensions import name_architecture

    with tempfile.TemporaryDirectory() as folder:
        held = Path(folder) / "output"
        try:
            with output_to(held) as console:
                if console.is_terminal:
                    with console.status(f"loading {what}"):
                        name_architecture()
                        yield
                else:
                    console.print(f"loading {what}")
                    name_architecture()
                    yield
        except ImportError:
            sys.stderr.write(held.read_text())
            raise
