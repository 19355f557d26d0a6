# SPDX-License-Identifier: Apache-2.0
"""Messages of commands besides their results: notes, details, the next command; their verbosity.

`-q` leaves results and errors, `-v` adds details and the output of libraries. Messages go to
stderr, so that stdout has only results. Light.
"""

import codecs
import io
import logging
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import typer

Verbosity = Literal["quiet", "normal", "verbose"]
LEVELS = {"quiet": logging.WARNING, "normal": logging.INFO, "verbose": logging.DEBUG}
LOG = logging.getLogger("longhaul")
ASCII = {
    "\N{FULL BLOCK}": "#",
    "\N{HORIZONTAL ELLIPSIS}": "...",
    "\N{EN DASH}": "-",
    "\N{EM DASH}": "-",
    "\N{BULLET}": "*",
    "\N{RIGHTWARDS ARROW}": "->",
}
"""Replacements for characters that the encoding of a terminal lacks; others become a `?`."""
ENCODING_ERRORS = "longhaul.ascii"
"""Name of the error handler that replaces them, for `open(errors=...)`."""


def set_verbosity(chosen: Verbosity) -> None:
    """Set the verbosity of all further messages."""
    LOG.setLevel(LEVELS[chosen])


def is_verbose() -> bool:
    """Return whether details and the output of libraries are shown."""
    return LOG.level <= logging.DEBUG


def is_quiet() -> bool:
    """Return whether only results and errors are shown."""
    return LOG.level > logging.INFO


def note(text: object) -> None:
    """Print a text to stderr that is neither a result nor an error, unless quiet."""
    if not is_quiet():
        sys.stdout.flush()  # what was printed before comes before it, in a pipe too
        typer.echo(text, err=True)


def detail(text: object) -> None:
    """Print a text to stderr that only `--verbose` asks for."""
    if is_verbose():
        typer.echo(text, err=True)


def next_command(words: Sequence[object] | str, what_for: str) -> None:
    """Print the command to type next, on a line of its own that can be copied whole."""
    line = words if isinstance(words, str) else shlex.join(map(str, words))
    note(f"next: {what_for}\n  {line}")


@contextmanager
def resumable(
    what: str = "resumes from the last checkpoint", saves: Sequence[Path] = ()
) -> Iterator[None]:
    """Print the command that resumes the work of the block if it is stopped or fails.

    `what` it does after it was stopped. `saves` are the folders that the work saves checkpoints to:
    while none has a complete one, the command starts again.
    """
    try:
        yield
    except (KeyboardInterrupt, RuntimeError) as error:
        program = "longhaul" if shutil.which("longhaul") else sys.argv[0]  # as `make demo` calls it
        command = shlex.join([program, *sys.argv[1:]])
        again = bool(saves) and not _is_any_saved(saves)
        if isinstance(error, KeyboardInterrupt):
            note(f"stopped; the same command {'starts again' if again else what}: {command}")
        elif type(error).__module__ == "slurm.experiment":
            asked = getattr(error, "was_asked", False)
            when = "" if asked else "once the cause is fixed, "
            note(f"{when}the same command {'starts again' if again else 'resumes'}: {command}")
        raise


def _is_any_saved(saves: Sequence[Path]) -> bool:
    from recipes.checkpoints.marker import is_marked  # its package must not load with the CLI

    return any(is_marked(one) for to in saves for one in to.glob("*"))


def write_in_the_terminal_s_encoding() -> None:
    """Have stdout and stderr replace the characters that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # its descriptor has been reused since it was opened
                stream.reconfigure(errors=ENCODING_ERRORS)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(ASCII.get(character, "?") for character in lacking), error.end


codecs.register_error(ENCODING_ERRORS, _replaced)
set_verbosity("normal")
