# SPDX-License-Identifier: Apache-2.0
"""What commands say besides their results: notes, details, the next command; and how much of it.

`-q` leaves results and errors, `-v` adds details and the output of libraries. Messages go to
stderr, so that stdout has results alone. Light.
"""

import codecs
import io
import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
"""What stands for a character where the encoding of a terminal lacks it; for others a `?`."""
ENCODING_ERRORS = "longhaul.ascii"
"""Name of the error handler that replaces them, for `open(errors=...)`."""


def set_verbosity(chosen: Verbosity) -> None:
    """Set how much is said from now on."""
    LOG.setLevel(LEVELS[chosen])


def is_verbose() -> bool:
    """Return whether details and the output of libraries are shown."""
    return LOG.level <= logging.DEBUG


def is_quiet() -> bool:
    """Return whether only results and errors are shown."""
    return LOG.level > logging.INFO


def note(text: object) -> None:
    """Say something on stderr that is neither a result nor an error."""
    if not is_quiet():
        typer.echo(text, err=True)


def detail(text: object) -> None:
    """Say something on stderr that only `--verbose` asks for."""
    if is_verbose():
        typer.echo(text, err=True)


def next_command(words: Sequence[object] | str, what_for: str) -> None:
    """Say which command to type next, on a line of its own that can be copied whole."""
    line = words if isinstance(words, str) else shlex.join(map(str, words))
    note(f"next: {what_for}\n  {line}")


@contextmanager
def resumable() -> Iterator[None]:
    """Say which command resumes the work inside where it is stopped or fails."""
    try:
        yield
    except (KeyboardInterrupt, RuntimeError) as error:
        command = shlex.join(["longhaul", *sys.argv[1:]])
        if isinstance(error, KeyboardInterrupt):
            note(f"stopped; the same command resumes from the last checkpoint: {command}")
        elif type(error).__module__ == "slurm.experiment":
            note(f"once the cause is mended, the same command resumes: {command}")
        raise


def write_in_the_terminal_s_encoding() -> None:
    """Have stdout and stderr replace the characters that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # its descriptor has become another's since it was opened
                stream.reconfigure(errors=ENCODING_ERRORS)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(ASCII.get(character, "?") for character in lacking), error.end


codecs.register_error(ENCODING_ERRORS, _replaced)
set_verbosity("normal")
