# SPDX-License-Identifier: Apache-2.0
"""Announce results of a long job as soon as their files are written."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from longhaul.terminal.messages import is_quiet

SECONDS = 1.0
"""Between two looks at the files."""
SILENT_SECONDS = 30.0
"""After the last line, until a part of a result is worth one."""


def _no_parts(_: str) -> Sequence[str]:
    return ()


@contextmanager
def announcing(
    console: Console,
    results: Mapping[str, Path],
    did: str,
    parts: Callable[[str], Sequence[str]] = _no_parts,
) -> Iterator[None]:
    """Print `NAME DID (1 of 3)` when the file of a name is written during the block.

    A single result is not announced, since the command ends with it. `parts` returns the finished
    parts of a result: new ones are printed as `NAME: PART measured` after half a minute without a
    line.
    """
    before = {name: _written(path) for name, path in results.items()}
    left = dict(results)
    finished = {name: set(parts(name)) for name in results}
    done = threading.Event()
    said = time.monotonic()

    def say(words: str) -> None:
        nonlocal said
        said = time.monotonic()
        console.print(Text(words), soft_wrap=True)

    def look() -> None:
        for name, path in list(left.items()):
            found = parts(name)
            new = [part for part in found if part not in finished[name]]
            finished[name] = set(found)
            if _written(path) != before[name]:
                del left[name]
                if len(results) > 1:
                    say(f"{name} {did} ({len(results) - len(left)} of {len(results)})")
            elif new and time.monotonic() - said >= SILENT_SECONDS:
                say(f"{name}: {', '.join(new)} measured")

    def watch() -> None:
        while not done.wait(SECONDS):
            look()

    if is_quiet() or (len(results) < 2 and parts is _no_parts):
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


def announcing_evaluations(
    console: Console, run: Path, names: Iterable[str]
) -> AbstractContextManager[None]:
    """Announce the evaluations of models of a run, and the parts that are measured."""
    from eval.finished_parts import titles_of
    from eval.run_folder import evaluation_path

    results = {name: evaluation_path(run, name) for name in names}
    return announcing(console, results, "evaluated", partial(titles_of, run))


def _written(path: Path) -> int | None:
    """Return when a file was last written, in nanoseconds; None if there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
