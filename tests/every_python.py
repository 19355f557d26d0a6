# SPDX-License-Identifier: Apache-2.0
"""What a newcomer does first, on every Python of this machine: `make test-pythons`.

    python -m tests.every_python [PYTHON ...]

For each interpreter that pyproject.toml admits, or each that is named: an environment in
`.pythons`, made by the Makefile and kept for the next time; then, in a clone whose path has blanks
and an umlaut, the fast tests of what a Python's version changes, a dry run, two steps of training,
and every block of the pages, the last two in a pipe and on a pseudo-terminal. Needs the standard
library alone.
"""

import os
import pty
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
ENVIRONMENTS = TREE / ".pythons"
MINORS = (10, 11, 12)
TESTS = (
    "tests/recipes/nemo2/test_signatures.py", "tests/recipes/resolved/test_check.py",
    "tests/recipes/test_ladder_recipes.py", "tests/recipes/shipped/test_import_by_name.py",
    "tests/longhaul/test_light_commands.py",
    "tests/longhaul/test_own_packages.py", "tests/slurm/test_experiment.py",
    "tests/longhaul/jobs/test_slurm_chain.py",
    "tests/data/test_cuda_extension.py", "tests/house/test_wheel.py",
)  # fmt: skip
TRAIN = (
    "pretrain", "--factory", "tiny_512", "data.store=the store", "trainer.max_steps=2",
    "trainer.val_check_interval=2",
)  # fmt: skip
PTY_COLUMNS = "100"
PAGES = "tests/house/test_readme.py"
TYPED_ON, PIPE, TERMINAL = "PAGES_TYPED_ON", "pipe", "terminal"
"""The variable that says where the blocks of the pages are typed, and its values."""


def interpreters() -> Iterator[Path]:
    """Yield the Pythons of this machine that Longhaul is for, each release once."""
    home = Path.home()
    candidates = [Path("/usr/bin/python3"), Path("/usr/local/bin/python3")]
    for minor in MINORS:
        found = shutil.which(f"python3.{minor}")
        candidates += [Path(found)] if found else []
        for folder in (
            Path(os.environ.get("PYENV_ROOT", home / ".pyenv")) / "versions",
            home / ".local" / "share" / "uv" / "python",
        ):
            candidates += sorted(folder.glob(f"*3.{minor}.*/bin/python3"))
    seen = set()
    for candidate in candidates:
        release = release_of(candidate)
        if release and release not in seen and int(release.split(".")[1]) in MINORS:
            seen.add(release)
            yield candidate


def release_of(python: Path) -> str:
    """Return the version of an interpreter, as 3.11.2; empty for one that does not start."""
    code = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
    try:
        return subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


class Newcomer:
    """One Python, its environment, and a clone to work in."""

    def __init__(self, python: Path, place: Path) -> None:
        self.release = release_of(python)
        self.python, self.place = python, place
        self.environment = ENVIRONMENTS / self.release
        self.clone = place / "a clone of Jürgen"
        self.failures = 0

    def begin(self) -> bool:
        """Make the environment and the clone; return whether there are both."""
        environment = self.environment.relative_to(TREE)
        make = ["make", f"VENV={environment}", f"PYTHON={self.python}", f"{environment}/.installed"]
        clone = ["git", "clone", "--quiet", "--shared", str(TREE), str(self.clone)]
        return self.step("install", make, TREE) and self.step("clone", clone, TREE)

    def work(self) -> None:
        """Take every step, each in a folder of its own."""
        longhaul = str(self.environment / "bin" / "longhaul")
        pytest = [str(self.environment / "bin" / "python"), "-m", "pytest", "--quiet"]
        self.step("fast tests", [*pytest, "-x", *TESTS], self.clone)
        folder = self.place / "books in a pipe"
        folder.mkdir()
        dry = [longhaul, "pretrain", "--factory", "tiny_512", "--dryrun"]
        self.step("dry run", dry, folder)
        source = str(self.clone / "recipes")
        prepare = [longhaul, "prepare", "--source", source, "--out", "the store"]
        if not self.step("prepare", [*prepare, "--vocab-size", "512"], folder):
            return
        self.step("2 steps in a pipe", [longhaul, *TRAIN], folder)
        other = self.place / "books on a terminal"
        other.mkdir()
        shutil.copytree(folder / "the store", other / "the store")
        self.step("2 steps on a terminal", [longhaul, *TRAIN], other, terminal=True)
        for name, place in {"in a pipe": PIPE, "on a terminal": TERMINAL}.items():
            typed = ["env", f"{TYPED_ON}={place}", *pytest, PAGES]
            self.step(f"pages {name}", typed, self.clone)

    def step(self, name: str, words: Sequence[str], folder: Path, terminal: bool = False) -> bool:
        """Take one step, print how it ended and what it took; return whether it ended well."""
        began = time.monotonic()
        home = self.place / "a home"
        home.mkdir(exist_ok=True)
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        if folder != TREE:
            variables |= {"HOME": str(home), "PYTHONPATH": str(self.clone)}
        run = on_a_terminal if terminal else in_a_pipe
        code, shown = run(words, folder, variables)
        took = time.monotonic() - began
        say(f"{self.release:8}{name:24}{'ok' if code == 0 else code:>4}{took:6.0f} s")
        if code:
            self.failures += 1
            say(shown[-4000:])
        return code == 0


def say(text: str) -> None:
    """Write a line at once: an install takes minutes."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def in_a_pipe(words: Sequence[str], folder: Path, variables: dict[str, str]) -> tuple[int, str]:
    """Run a program; return its exit code and what it wrote."""
    done = subprocess.run(
        words, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def on_a_terminal(words: Sequence[str], folder: Path, variables: dict[str, str]) -> tuple[int, str]:
    """Run a program on a pseudo-terminal; return its exit code and what it wrote."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        words, cwd=folder, env={**variables, "TERM": "xterm", "COLUMNS": PTY_COLUMNS},
        stdin=its, stdout=its, stderr=its, start_new_session=True,
    )  # fmt: skip
    os.close(its)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # Linux says so when the last process has closed the terminal
            piece = b""
        if not piece:
            break
        shown += piece
    os.close(ours)
    return process.wait(), shown.decode(errors="replace")


def main() -> int:
    """Work through the Pythons; return 1 where a step of one failed."""
    failures = 0
    for python in [Path(word) for word in sys.argv[1:]] or list(interpreters()):
        with tempfile.TemporaryDirectory() as place:
            newcomer = Newcomer(python, Path(place))
            if not newcomer.release:
                say(f"{python} does not start")
                failures += 1
            elif newcomer.begin():
                newcomer.work()
            failures += newcomer.failures
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
