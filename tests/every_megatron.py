# SPDX-License-Identifier: Apache-2.0
"""The tests of `custom_modules` on other releases of Megatron-Core: `make test-megatron`.

    python -m tests.every_megatron 0.17 0.19.2 [--out PAGE.md] [--only 'not slow']
    python -m tests.every_megatron --bridge llama3_8b_nemo_16k tiny_512 [--out PAGE.md]

For each release: an environment `.pythons/megatron-<version>` with that release alone, over one
that all of them share, `.pythons/megatron`, with torch and what the tests import. Neither has NeMo.
Both are kept for the next time. Megatron-Core 0.17 and later need Python 3.12.

The second form, `make bridge`, has `benchmarks.bridge_build` build recipes with Megatron-Bridge, in
an environment of the same kind.

Ends with 1 if a test fails that `LEFT` does not name, or one passes that it names.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.every_python import interpreters, release_of, say

TREE = Path(__file__).resolve().parents[1]
ENVIRONMENTS = TREE / ".pythons"
SHARED = ENVIRONMENTS / "megatron"
PYTHON = "3.12"
TESTS = "tests/custom_modules"
RELEASE = re.compile(r"\d+\.\d+(\.\d+)?", re.ASCII)
PACKAGES = (
    "numpy", "packaging", "lightning", "transformers", "tokenizers", "safetensors", "psutil",
    "nvidia-ml-py", "py-spy", "einops", "mpmath", "pyarrow", "pyyaml", "typer", "rich", "pydantic",
    "jinja2", "pytest", "pytest-timeout", "pytest-xdist",
)  # fmt: skip
"""What the tests of `custom_modules` import besides torch and Megatron-Core, as the lock has it."""
BRIDGE = ("megatron-core==0.19.2", "megatron-bridge==0.6.2")
"""Installed without their dependencies, most of which are for GPUs, images or sound."""
OF_BRIDGE = (
    "numpy<2", "transformers==5.12.1", "omegaconf>=2.3", "hydra-core<1.4", "einops", "datasets",
    "tensorboard", "tqdm", "six", "peft", "accelerate", "diffusers", "pillow", "pyarrow<26",
    "megatron-energon",
)  # fmt: skip
"""Packages that Megatron-Bridge imports to read, validate and build a GPT.

NumPy is that of the shared environment, and pyarrow 26 needs a later one without saying so."""
WITHOUT = {
    "tests/custom_modules/callbacks/test_stragglers.py": (
        "nvidia-resiliency-ext before 0.5, which the pins of NeMo 2 ask for, stops the import of "
        "Megatron-Core 0.17 and later, and its later releases need glibc 2.39"
    ),
}
"""Tests that are not run, with the reason: a package is missing, not a release of Megatron-Core."""
LEFT: dict[str, str] = {
    "tests/custom_modules/cpu/test_torch_adam.py::"
    "test_a_training_continues_from_its_checkpoint_bit_for_bit[fully_sharded_model_space]": (
        "optimizer states of that form are flattened ranges, which Megatron-Core 0.17 and later "
        "neither save nor load; take fully_reshardable"
    ),
}
"""Tests that fail on releases from 0.17 on, by the beginning of their names, with the reason."""


class Outcome(NamedTuple):
    """How the tests of one release ended."""

    release: str
    passed: list[str]
    failed: dict[str, str]
    """Name of a test and the last line of its error."""
    skipped: int
    seconds: float

    def surprises(self) -> Iterator[str]:
        """Yield what `LEFT` does not say of a release that it is for."""
        left = tuple(LEFT) if older_than(self.release, 17) is False else ()
        yield from (f"{name} fails: {why}" for name, why in self.failed.items()
                    if not name.startswith(left or "\0"))  # fmt: skip
        yield from (f"{name} passes, and LEFT names it" for name in self.passed
                    if left and name.startswith(left))  # fmt: skip


def older_than(release: str, minor: int) -> bool:
    """Return whether a release 0.x is before 0.minor."""
    return int(release.split(".")[1]) < minor


def python312(named: str) -> Path:
    """Return the interpreter that was named, or the first Python 3.12; raise ValueError."""
    if named and not release_of(Path(named)).startswith(f"{PYTHON}."):
        raise ValueError(
            f"{named} is Python {release_of(Path(named)) or '(it does not start)'}; Megatron-Core "
            f"0.17 and later, with the packages of the lock, take Python {PYTHON}"
        )
    for python in [Path(named)] if named else interpreters():
        if release_of(python).startswith(f"{PYTHON}."):
            return python
    raise ValueError(
        f"no Python {PYTHON} was found, which Megatron-Core 0.17 and later need; install one, or "
        "name it: make test-megatron PYTHON=/path/to/python3.12 VERSION=0.19"
    )


def shared(python: Path) -> Path:
    """Return the interpreter of the environment that all releases share; make it at first."""
    lock = TREE / f"constraints-py{PYTHON.replace('.', '')}.txt"
    torch = re.search(r'"(torch==[^"]+)"', (TREE / "pyproject.toml").read_text())
    if torch is None:
        raise ValueError("pyproject.toml pins no torch")
    key = hashlib.sha256(lock.read_bytes() + " ".join((torch[1], *PACKAGES)).encode()).hexdigest()
    stamp, own = SHARED / ".installed", SHARED / "bin" / "python"
    if stamp.exists() and stamp.read_text() == key:
        return own
    say(f"Installing into {SHARED.relative_to(TREE)}: 2 to 5 GB, kept for the next time ...")
    run([python, "-m", "venv", "--clear", SHARED])
    install = [own, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "-c", lock]
    run([*install, torch[1]])
    run([*install, *PACKAGES])
    stamp.write_text(key)
    return own


def environment(version: str, base: Path) -> Path:
    """Return the interpreter of a release's environment; make it at first.

    Raises ValueError for a release that is not published.
    """
    folder = ENVIRONMENTS / f"megatron-{version}"
    stamp = folder / ".installed"
    if stamp.exists():
        return folder / "bin" / "python"
    own = empty(folder, base)
    wanted = f"megatron-core=={version}" + ("" if version.count(".") == 2 else ".*")
    done = subprocess.run(
        [*pip_for(own, base), "--no-deps", wanted], capture_output=True, text=True, check=False
    )
    if done.returncode:
        published = re.search(r"from versions: ([^)]*)\)", done.stderr)
        if published is None:
            raise ValueError(f"{wanted} cannot be installed: {done.stderr.strip()[-400:]}")
        newest = ", ".join(published[1].split(", ")[-8:])
        raise ValueError(
            f"Megatron-Core {version} is not published for Python {PYTHON}; the last are {newest}"
        )
    stamp.touch()
    return own


def bridge(base: Path) -> Path:
    """Return the interpreter of the environment with Megatron-Bridge; make it at first."""
    folder = ENVIRONMENTS / "megatron-bridge"
    stamp, key = folder / ".installed", " ".join((*BRIDGE, *OF_BRIDGE))
    if stamp.exists() and stamp.read_text() == key:
        return folder / "bin" / "python"
    say(f"Installing into {folder.relative_to(TREE)}: 0.4 GB, kept for the next time ...")
    own = empty(folder, base)
    run([*pip_for(own, base), "--no-deps", *BRIDGE])
    run([*pip_for(own, base), *OF_BRIDGE])
    stamp.write_text(key)
    return own


def empty(folder: Path, base: Path) -> Path:
    """Return the interpreter of a new environment over the shared one, whose packages it sees."""
    run([base, "-m", "venv", "--clear", "--without-pip", folder])
    site = next(folder.glob("lib/python*/site-packages"))
    below = next(SHARED.glob("lib/python*/site-packages"))
    (site / "shared.pth").write_text(f"{below}\n")
    return folder / "bin" / "python"


def pip_for(python: Path, base: Path) -> list[str | Path]:
    """Return the shared environment's pip, installing into another."""
    return [base, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "-q"]


def run(words: Sequence[str | Path]) -> None:
    """Run a program; raise ValueError with the end of its output if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{words[0]} failed: {(done.stdout + done.stderr).strip()[-400:]}")


def tested(python: Path, asked: argparse.Namespace) -> Outcome:
    """Run the tests on the release of an environment."""
    release = subprocess.run(
        [python, "-c", "from importlib.metadata import version; print(version('megatron-core'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    say(f"Megatron-Core {release}:")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.xml"
        command = [
            python, "-m", "pytest", "--quiet", "-p", "no:warnings", "--tb=short",
            f"--junitxml={result}", *(f"--ignore={name}" for name in WITHOUT),
            *(("-m", asked.only) if asked.only else ()),
            *(("-p", "tests.first_cases") if asked.first_cases else ()), *(asked.tests or (TESTS,)),
        ]  # fmt: skip
        programs = f"{SHARED / 'bin'}{os.pathsep}{os.environ['PATH']}"  # py-spy
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": programs}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)  # a tree of this size is compiled once
        subprocess.run(command, cwd=TREE, env=variables, check=False)
        if not result.exists():
            raise ValueError(f"the tests on Megatron-Core {release} did not run to their end")
        return outcome(release, ElementTree.parse(result).getroot())


def outcome(release: str, root: ElementTree.Element) -> Outcome:
    """Read a result of pytest, as JUnit's XML."""
    passed, failed, skipped = [], {}, 0
    for case in root.iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        wrong = next(
            (case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None
        )
        if wrong is not None:
            failed[name] = _last_error(wrong)
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed.append(name)
    seconds = sum(float(suite.get("time", 0)) for suite in root.iter("testsuite"))
    return Outcome(release, passed, failed, skipped, seconds)


def _last_error(wrong: ElementTree.Element) -> str:
    """Return the last line that pytest marks as the error; ranks have theirs in the same text."""
    said = [line[1:].strip() for line in (wrong.text or "").splitlines() if line.startswith("E ")]
    told = [line for line in said if line] or [wrong.get("message") or "no message"]
    return told[-1].splitlines()[-1][:200]


def room(name: str) -> str:
    """Return the folder of custom_modules that a test is for."""
    return name.removeprefix(f"{TESTS}/").split("/")[0]


def sections(outcomes: Sequence[Outcome], which: str) -> list[str]:
    """Return the tables of a page."""
    from benchmarks.harness.page import table  # imports torch

    rooms = sorted({room(name) for each in outcomes for name in (*each.passed, *each.failed)})
    cells = [
        [folder, *(
            f"{sum(room(name) == folder for name in each.passed):,} / "
            f"{sum(room(name) == folder for name in each.failed):,}"
            for each in outcomes
        )]
        for folder in rooms
    ]  # fmt: skip
    cells.append(["all", *(f"{len(each.passed):,} / {len(each.failed):,}" for each in outcomes)])
    cells.append(["skipped", *(f"{each.skipped:,}" for each in outcomes)])
    cells.append(["seconds", *(f"{each.seconds:,.0f}" for each in outcomes)])
    said = [
        f"{which}: passed / failed.",
        table(["tests/custom_modules", *(each.release for each in outcomes)], cells),
    ]
    said.append(
        "## Not run\n\n" + "\n".join(f"* `{name}`: {why}." for name, why in WITHOUT.items())
    )
    failures = {name: why for each in outcomes for name, why in each.failed.items()}
    if failures:
        rows = [
            [f"`{name}`", ", ".join(each.release for each in outcomes if name in each.failed),
             next((why for start, why in LEFT.items() if name.startswith(start)), failures[name])
             .replace("|", "\\|")]
            for name in sorted(failures)
        ]  # fmt: skip
        said.append("## Failed\n\n" + table(["test", "on", "why"], rows))
    return said


def main(words: Sequence[str] | None = None) -> int:
    """Test the releases; return 1 where one is not as `LEFT` says, 2 for a mistake."""
    parser = argparse.ArgumentParser(prog="make test-megatron", description=__doc__)
    parser.add_argument("versions", nargs="*", help="releases, as 0.19 or 0.19.2")
    parser.add_argument("--python", default="", help="a Python 3.12")
    parser.add_argument("--only", default="", help="a mark of pytest, as 'not slow'")
    parser.add_argument("--first-cases", action="store_true", help="one case of each test")
    parser.add_argument("--tests", nargs="*", default=(), help="files instead of all")
    parser.add_argument("--bridge", nargs="+", help="recipes for Megatron-Bridge to build")
    parser.add_argument("--out", type=Path, help="page to write")
    asked = parser.parse_args(words)
    try:
        for version in () if asked.bridge else asked.versions or [""]:
            if not RELEASE.fullmatch(version):
                raise ValueError(
                    f"VERSION {version!r} is not a release of Megatron-Core; expected one such as "
                    "0.19 or 0.19.2, or several: VERSION='0.17 0.18 0.19'"
                )
        base = shared(python312(asked.python))
        if asked.bridge:
            built = [bridge(base), "-W", "ignore", "-m", "benchmarks.bridge_build", *asked.bridge]
            page_words = ["--out", asked.out.resolve()] if asked.out else []
            return subprocess.run([*built, *page_words], cwd=TREE, check=False).returncode
        outcomes = [tested(environment(version, base), asked) for version in asked.versions]
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return report(outcomes, chosen(asked), asked.out)


def chosen(asked: argparse.Namespace) -> str:
    """Return which tests were asked for, in words."""
    cases = "The first case of each test" if asked.first_cases else "All cases of the tests"
    marked = f", {asked.only}" if asked.only else ""
    return f"{cases} in {', '.join(asked.tests) or TESTS}{marked}"


def report(outcomes: Sequence[Outcome], which: str, out: Path | None) -> int:
    """Print the page, write it if asked, and say what `LEFT` does not; return 1 then, else 0."""
    from benchmarks.harness.machine import facts  # imports torch
    from benchmarks.harness.page import page, write

    text = page(
        "custom_modules on other releases of Megatron-Core", facts(), sections(outcomes, which)
    )
    say(text)
    if out:
        write(out, text)
    surprises = [f"{each.release}: {line}" for each in outcomes for line in each.surprises()]
    for line in surprises:
        say(line)
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
