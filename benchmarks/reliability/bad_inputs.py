# SPDX-License-Identifier: Apache-2.0
"""Wrong inputs: what each is answered with, and what it leaves behind.

    python -m benchmarks.reliability.bad_inputs
    python -m benchmarks.reliability.bad_inputs --with-nemo

Claim: every wrong word, file and place ends as one sentence that names it and says what would be
right, with exit code 2, without a traceback, and with no file more or fewer in the folder. All run
in this process, one after the other, each in a folder of its own. `--with-nemo` adds those that are
refused after NeMo is imported, which takes 20 seconds once.
"""

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from benchmarks.reliability import wrong_files, wrong_recipes, wrong_words

_VERBS = (
    "add|ask|check|choose|copy|download|fix|give|leave|look|make|mend|mount|name|prepare|put|quote"
    "|raise|remove|run|save|see|set|state|take|train|type|use|write"
)
REMEDIES = (
    rf"(?:^error: |[;:,(] (?:or |then |and |so )?)(?:{_VERBS}) ",
    r"did you mean|there are [\w'`-]+(?:,| and)|would do|; nearest: ",
    r"at (?:least|most) |\bis the (?:least|most|minimum|maximum)\b|no model has more than",
    r"must (?:be|lie) |it should be |it is from \d|may (?:be \d|have )|it (?:has|takes|is one of) ",
    r"expected ",
    r"its (?:\w+ are|field )",
    r"it is (?:an? |[\w, ]+ or |\w+, \w+)|a \w+ is (?:needed|a |of )|\bnot an? [\w ]+ but ",
    r"trained here has|known(?: here)?(?::| are)|has no '\w+'",
    r"(?:, as|for example|such as) \S|\bas (?:\d|--|`)|`longhaul [a-z]|any three of|; \w+ measures",
    r"line \d|byte \d",
    r"there is no run folder",
)
REMEDY = re.compile("|".join(REMEDIES), re.I)
"""How a sentence says what would be right, what there is, or where in a file the fault lies."""
OF_CLICK = re.compile(
    r"not in the range|is not a valid|requires an argument|Missing (?:option|argument)"
    r"|No such (?:command|option)|unexpected extra argument"
)
"""The sentences of click, each under the line of usage and how to get help."""
USAGE = re.compile(r"Usage: .*? Try '[^']*' for help\. ")
SHORTEST = 3
"""Characters of what an answer has to name: fewer are found in any sentence."""
FRAME = str.maketrans(dict.fromkeys("╭╮╰╯─│", " "))


NO_FILES: wrong_files.Files = {}


class Case(NamedTuple):
    """One wrong input."""

    words: str
    """Of the command line, as in a shell."""
    named: str
    """What the answer has to say, as words: the wrong value, or the file."""
    files: wrong_files.Files = NO_FILES

    @property
    def command(self) -> str:
        """The sub-command."""
        return self.words.split()[0]


class Answered(NamedTuple):
    """What a case ended with."""

    code: object
    said: str
    raised: str
    """The traceback of an exception that came through."""
    changed: list[str]
    """Files that are there after it and were not before, and the other way round."""


def light() -> Iterator[Case]:
    """Yield the cases that are refused before NeMo is imported."""
    for words in wrong_words.TABLES:
        yield from (Case(*row) for row in words)
    for files in wrong_files.TABLES:
        yield from (Case(*row) for row in files)


def with_nemo() -> Iterator[Case]:
    """Yield the cases that are refused once a recipe is built."""
    yield from (Case(*row) for row in wrong_recipes.TABLE)


def answered(case: Case, main: Callable[[], None]) -> Answered:
    """Run a case in a folder of its own."""
    before_words, before_folder = sys.argv, Path.cwd()
    out, err, raised, code = io.StringIO(), io.StringIO(), "", None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, content in case.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).mkdir() if content is None else (folder / path).write_bytes(content)
        before = _files(folder)
        os.chdir(folder)
        sys.argv = ["longhaul", *shlex.split(case.words)]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main()
        except SystemExit as end:
            code = end.code
        except BaseException:  # what a user would see as a traceback
            raised = traceback.format_exc()
        finally:
            sys.argv = before_words
            os.chdir(before_folder)
        after = _files(folder)
    changed = sorted({path for path, _ in before.items() ^ after.items()})
    return Answered(code, out.getvalue() + err.getvalue(), raised, changed)


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def sentence(said: str) -> str:
    """Return what an answer says is wrong, without click's usage and frame."""
    ours = [line for line in said.splitlines() if line.startswith("error: ")]
    if len(ours) == 1:
        return ours[0]
    return USAGE.sub("", " ".join(said.translate(FRAME).split()))


def problems(case: Case, end: Answered) -> Iterator[str]:
    """Yield what is wrong with an answer: one word each, by which they are counted."""
    said = sentence(end.said)
    if end.raised or "Traceback" in end.said:
        yield "traceback"
    elif end.code != 2:
        yield "exit code"
    if end.changed:
        yield "leftover"
    if not re.search(rf"(?<!\w){re.escape(case.named)}(?!\w)", said):
        yield "not named"
    if not (REMEDY if said.startswith("error: ") else OF_CLICK).search(said):
        yield "no remedy"


class Outcome(NamedTuple):
    """A case with what was wrong with its answer."""

    case: Case
    end: Answered
    problems: list[str]
    seconds: float

    def __str__(self) -> str:
        """The case, its problems and what was said."""
        said = self.end.raised or " ".join(self.end.said.split())
        left = f" left {', '.join(self.end.changed)}" if self.end.changed else ""
        return (
            f"longhaul {self.case.words} ({self.case.named}): {', '.join(self.problems)}; exit "
            f"{self.end.code}{left}: {said}"
        )


def outcomes(cases: Iterable[Case], main: Callable[[], None]) -> Iterator[Outcome]:
    """Run each case and yield what came of it."""
    for case in cases:
        begun = time.perf_counter()
        end = answered(case, main)
        yield Outcome(case, end, list(problems(case, end)), time.perf_counter() - begun)


def installed() -> Callable[[], None]:
    """Return what the console script `longhaul` runs."""
    (script,) = metadata.entry_points(group="console_scripts", name="longhaul")
    loaded: Callable[[], None] = script.load()
    return loaded


KINDS = ("traceback", "exit code", "leftover", "not named", "no remedy")


def main() -> None:
    """Run all cases, and write the page; exit with 1 where an answer is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--with-nemo", action="store_true", help="add those that need NeMo")
    parser.add_argument("--out", type=Path, help="write the page there as well")
    given = parser.parse_args()
    cases = [*light(), *(with_nemo() if given.with_nemo else ())]
    found = list(outcomes(cases, installed()))
    rows = []
    for command in (*dict.fromkeys(one.case.command for one in found), "all"):
        of = [one for one in found if command in (one.case.command, "all")]
        counts = Counter(kind for one in of for kind in one.problems)
        seconds = sum(one.seconds for one in of)
        rows.append([command, "", str(len(of)), *(str(counts[kind]) for kind in KINDS),
                     f"{seconds:.1f}"])  # fmt: skip
    head = ["command", "", "cases", *KINDS, "seconds"]
    wrong = [f"* {one}" for one in found if one.problems]
    text = page("Wrong inputs", facts(("typer",)), [table(head, rows), *wrong])
    sys.stdout.write(text)
    if given.out is not None:
        write(given.out, text)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
