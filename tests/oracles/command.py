# SPDX-License-Identifier: Apache-2.0
"""The command line of the tree that is on Python's path: the one place that names its modules."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

FOLDER = Path(__file__).resolve().parent
LADDER = FOLDER / "ladder"
AS_HERE = "LONGHAUL_ORACLE_WORDS"
"""Environment variable: set where the tree is the working tree, whose words `words.yaml` has."""
MODULE = "longhaul.cli"
DROPPED = "dropped"
"""Entry of what this tree has no more, with a reason in `words.yaml`."""


class Answered(NamedTuple):
    """Exit code and output of a command."""

    code: object
    out: str
    err: str

    def text(self) -> str:
        """Return what it printed; raise RuntimeError if it failed."""
        if self.code not in (None, 0):
            raise RuntimeError(f"exit code {self.code}: {self.err[-3000:]}")
        return self.out


def table(name: str) -> Any:
    """Return the table in a YAML file next to this one."""
    return yaml.load((FOLDER / name).read_text(), Loader=yaml.CSafeLoader)


@cache
def _words() -> dict[str, Any]:
    none: dict[str, Any] = {"rewrite": [], "lines": {}, "dropped": {}}
    return table("words.yaml") if AS_HERE in os.environ else none


def dropped(line: str) -> bool:
    """Whether nothing is left of a command line in this tree."""
    return line in _words()["dropped"]


def here(line: str, named: str = "") -> tuple[str, str]:
    """Return a command line in this tree's words, and what its answer has to name."""
    words = _words()
    if line in words["lines"]:
        line, named = words["lines"][line]
        return line, named
    for pattern, new in words["rewrite"]:
        line = re.sub(pattern, new, line)
    return line, named


def answer(line: str) -> Answered:
    """Run a command line in this process and in this folder."""
    from longhaul.cli import main

    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["longhaul", *shlex.split(here(line)[0])]
    code: object = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code
    except BaseException:  # what a user would see as a traceback
        code = traceback.format_exc()
    finally:
        sys.argv = before
    return Answered(code, out.getvalue(), err.getvalue())


def process(line: str, **options: Any) -> subprocess.Popen[str]:
    """Start a command line as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, *shlex.split(here(line)[0])],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options,
    )  # fmt: skip


def ended(line: str) -> str:
    """Run a command line as a process to its end; return what it printed, or raise RuntimeError."""
    running = process(line)
    out, _ = running.communicate()
    if running.returncode:
        raise RuntimeError(f"{line}: exit code {running.returncode}: {out[-3000:]}")
    return out


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Work in a new folder, whose path has the same length in both trees."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="oracle-") as name:
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(before)


def tree() -> Path:
    """Return the folder of the tree that is on Python's path."""
    import longhaul

    return Path(longhaul.__file__ or "").resolve().parents[1]


def settled(text: str, place: Path) -> str:
    """Return a text without the paths of this run."""
    text = text.replace(os.environ.get("HF_HOME", "") or "CACHE", "CACHE")
    return text.replace(str(place), "FOLDER").replace(str(tree()), "TREE")
