# SPDX-License-Identifier: Apache-2.0
"""Console output: tables that fit the terminal, and one line while libraries load or jobs run."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.measure import Measurement
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from longhaul.terminal.messages import ENCODING_ERRORS, is_quiet, is_verbose, note

IN_A_PIPE = 120
"""Columns of text if there is no terminal."""
TEE_SECONDS = 5.0
"""How long the last lines of a verbose command may take to be shown."""


def plain_console(file: IO[str] | None = None, **given: Any) -> Console:
    """Return a console that prints text verbatim: `[old]` in a path is not a style of rich."""
    return Console(file=file, markup=False, highlight=False, emoji=False, **given)


def table_for_terminal(
    table: Callable[[Sequence[str]], Table], expendable: Sequence[str] = ()
) -> tuple[Console, Table, Sequence[str]]:
    """Return a console for verbatim text, a table made for its width, and the columns left out.

    `table` builds the table without the columns it is given: as few of the expendable ones, from
    the first on, as possible. In a pipe, where lines are searched, the console has the width of
    the whole table instead: a row is one line. COLUMNS gives a pipe the width of a terminal. Words
    are never cut: if the narrowest table is too wide, its lines exceed those of the terminal.
    """
    console = plain_console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        whole = table(())
        console.width = max(IN_A_PIPE, width_of(console, whole))
        return console, whole, ()
    tried = [(table(expendable[:count]), count) for count in range(len(expendable) + 1)]
    fitting = [made for made in tried if width_of(console, made[0]) <= console.width]
    found, count = (fitting or tried[-1:])[0]
    if not fitting:
        console.width = max(console.width, _least(console, found))
    return console, found, expendable[:count]


def show(table: Callable[[Sequence[str]], Table], expendable: Sequence[str] = ()) -> Sequence[str]:
    """Print a table that fits the terminal, and return the columns left out."""
    console, made, left_out = table_for_terminal(table, expendable)
    print_table(console, made)
    return left_out


def print_left_out(lines: Sequence[Mapping[str, str]], first: str, left_out: Sequence[str]) -> None:
    """Print below a table the columns that it left out: a line per row, by its `first` column."""
    for line in lines:
        words = "; ".join(
            f"{title} {line[title]}" for title in line if title in left_out and line[title]
        )
        if words:
            print(f"{line[first]}: {words}")


def print_table(console: Console, table: Table) -> None:
    """Print a table below its title, which is one line however narrow the columns are.

    In a pipe, where lines are searched and stored, lines have no trailing blanks.
    """
    if table.title:
        style = "table.title" if table.title_style is None else table.title_style
        console.print(Text(str(table.title), style=style), soft_wrap=True)
        table.title = None
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.out(line.rstrip(), highlight=False)


def width_of(console: Console, table: Table) -> int:
    """Return the columns of text that a table takes if nothing limits it."""
    return Measurement.get(console, console.options.update(max_width=1_000), table).maximum


def _least(console: Console, table: Table) -> int:
    """Return the columns of text that a table takes if cells are broken only between words.

    Sets the minimum widths of the table's columns accordingly.
    """
    between = width_of(console, table) - sum(
        _longest(column, whole=True) for column in table.columns
    )
    for column in table.columns:
        column.min_width = _longest(column, whole=bool(column.no_wrap))
    return between + sum(column.min_width or 0 for column in table.columns)


def _longest(column: Column, *, whole: bool) -> int:
    """Return the length of a column's longest line, or of its longest word."""
    texts = [str(column.header), *map(str, column.cells)]
    parts = [part for text in texts for part in (text.splitlines() if whole else text.split())]
    return max(map(cell_len, parts), default=0)


@contextmanager
def output_to(path: Path) -> Iterator[Console]:
    """Redirect stdout and stderr to a file; yield a console on the original stderr.

    File descriptors are redirected, so C++ and child processes are covered too. With `--verbose`
    the output is shown on stderr as well.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    tee, file = _sink(path, kept[1])
    try:
        os.dup2(file, 1)
        os.dup2(file, 2)
        shown = os.fdopen(
            os.dup(kept[1]), "w", encoding=sys.stderr.encoding, errors=ENCODING_ERRORS
        )
        with shown:
            yield plain_console(shown)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for descriptor in (*kept, file):
            os.close(descriptor)
        if tee is not None:
            _ended(tee)


def _sink(path: Path, shown: int) -> "tuple[subprocess.Popen[bytes] | None, int]":
    """Return the process that also shows the output if verbose, and the file's descriptor."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if not is_verbose():
        return None, file
    os.close(file)
    # -i: Ctrl-C is for the command, whose last output is still to be shown.
    tee = subprocess.Popen(["tee", "-i", "-a", path], stdin=subprocess.PIPE, stdout=shown)
    assert tee.stdin is not None
    descriptor = os.dup(tee.stdin.fileno())
    tee.stdin.close()
    return tee, descriptor


def _ended(tee: "subprocess.Popen[bytes]") -> None:
    try:
        tee.wait(TEE_SECONDS)
    except subprocess.TimeoutExpired:  # a process that is left over still holds the pipe
        tee.terminate()
        tee.wait()


@contextmanager
def busy(console: Console, what: str) -> Iterator[None]:
    """Show what is being done: by a spinner on a terminal, elsewhere by a line."""
    if is_quiet():
        yield
    elif is_verbose() or not console.is_terminal:
        console.print(Text(what), soft_wrap=True)
        yield
    else:
        # The output of libraries is held back by descriptor: rich must not replace sys.stderr.
        spinner = Spinner("line", Text(what))
        with Live(
            spinner, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        ):
            yield


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Show what is being loaded, and hold back its output unless it fails."""
    from data.cuda_extension import during_import

    with held_back(f"loading {what}"), interruptible(), during_import():
        yield


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the block if a library in it suppressed one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, interrupts = signal.getsignal(signal.SIGINT), list[int]()
    if not callable(before):  # ignored, as under nohup, or the system's
        yield
        return

    def interrupted(number: int, frame: Any) -> None:
        interrupts.append(number)
        before(number, frame)

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    except Exception:
        if interrupts:  # what an interrupted import has raised says nothing
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


@contextmanager
def held_back(what: str = "") -> Iterator[None]:
    """Hold back the output of the block unless it fails; show what is being done, if given.

    A user's error is not such a failure: it is reported in a sentence.
    """
    if is_verbose():
        if what:
            note(what)
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        held = Path(folder) / "output"
        try:
            with output_to(held) as console, busy(console, what) if what else nullcontext():
                yield
        except Exception as error:
            if not _is_the_user_s(error):
                sys.stderr.write(held.read_text(errors="replace"))
            raise


def _is_the_user_s(error: Exception) -> bool:
    """Return whether an error is reported in a sentence: a user's error, or one of a file."""
    return isinstance(error, ValueError) or (isinstance(error, OSError) and error.errno is not None)
