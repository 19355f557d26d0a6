# SPDX-License-Identifier: Apache-2.0
"""What no file of the tree may hold. `make lint` runs this file too."""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from tests.house.rooms import TREE

PRIVATE_PATH = re.compile(r"(?<![\w.$}/-])/(?:home|root|work|tmp|Users)/[\w.]")
REGISTRY_HOST = re.compile(r"\b(?:pypi\.org|pythonhosted\.org|download\.pytorch\.org)\b")
# The build of PyTorch without CUDA, which no other index has.
CPU_INDEX = re.compile(r"CPU_BUILD := .*https://download\.pytorch\.org/whl/cpu\)")
BANNER = re.compile(r"[-=#*~]{4,}")
OPEN_TASK = re.compile(r"\b(?:TODO|FIXME|XXX)\b(?!\(#\d+\):)")
OF_CPU_BUILDS = b"CPU_BUILD := $(--index-url https://download." + b"pytorch.org/whl/cpu)\n"
LARGEST_FILE_KB = 500
LONGEST_SOURCE_LINES = 600


def files() -> list[Path]:
    """Return the files that are tracked or would be."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=TREE,
        stdout=subprocess.PIPE,
        check=True,
    )
    paths = (TREE / name.decode() for name in listed.stdout.split(b"\0") if name)
    return [path for path in paths if path.is_file()]


def faults(name: str, content: bytes) -> Iterator[str]:
    """Yield what is wrong with one file, each fault with its line."""
    if len(content) > LARGEST_FILE_KB * 1000:
        yield f"{name}: {len(content)} bytes, more than {LARGEST_FILE_KB} kB"
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        return
    if content and not content.endswith(b"\n"):
        yield f"{name}: no end of line at its end"
    for number, line in enumerate(lines, 1):
        if PRIVATE_PATH.search(line):
            yield f"{name}:{number}: a path of one machine: {line.strip()}"
        cpu_index = name == "Makefile" and CPU_INDEX.fullmatch(line)
        if REGISTRY_HOST.search(line) and not cpu_index:
            yield f"{name}:{number}: the host of a package registry: {line.strip()}"
    if name.endswith(".py"):
        if len(lines) > LONGEST_SOURCE_LINES:
            yield f"{name}: {len(lines)} lines, more than {LONGEST_SOURCE_LINES}"
        yield from comment_faults(name, content.decode())


def comment_faults(name: str, source: str) -> Iterator[str]:
    """Yield what is wrong with the comments of one Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            where = f"{name}:{token.start[0]}"
            if BANNER.search(token.string):
                yield f"{where}: a banner"
            if OPEN_TASK.search(token.string):
                yield f"{where}: an open task without its issue, as in TODO(#12):"
            if not token.string.isascii():
                yield f"{where}: a comment that is not ASCII"


def test_no_file_of_the_tree_has_a_fault():
    listed = files()
    assert TREE / "pyproject.toml" in listed
    found = [
        fault
        for file in listed
        for fault in faults(file.relative_to(TREE).as_posix(), file.read_bytes())
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.bin", b"\xff" * (LARGEST_FILE_KB * 1000 + 1)),
        ("a.md", b"no end of line"),
        ("a.yaml", b"mount: " + b"/home" + b"/ada\n"),
        ("a.md", b"as in " + b"/tmp" + b"/run.\n"),
        ("a.txt", b"--index-url https://" + b"pypi" + b".org/simple\n"),
        ("a.yml", OF_CPU_BUILDS),
        ("Makefile", OF_CPU_BUILDS.replace(b"cpu", b"cu130")),
        ("a.py", b"\n" * (LONGEST_SOURCE_LINES + 1)),
        ("a.py", b"# -------- helpers\n"),
        ("a.py", b"x = 1  # TODO: later\n"),
        ("a.py", "x = 1  # one \u2192 two\n".encode()),
    ],
)
def test_a_fault_is_found(name, content):
    assert len(list(faults(name, content))) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.bin", b"\xff" * 1000),
        ("a.py", b"x = '----'  # TODO(#12): name it\n"),
        ("a.yaml", b"mount: $HOME/work/runs\nroot: recipes/work/a\n"),
        ("Makefile", OF_CPU_BUILDS),
    ],
)
def test_a_sound_file_passes(name, content):
    assert list(faults(name, content)) == []


def test_the_lock_holds_for_every_release_of_its_python():
    lock = TREE / "constraints-py{}{}.txt".format(*sys.version_info[:2])
    first = "{}.{}.0".format(*sys.version_info[:2])
    newer = [
        f"{one.name} {one.version} needs Python {one.metadata.get('Requires-Python')}"
        for one in distributions()
        if f"{one.name}=={one.version}" in lock.read_text().splitlines()
        and not SpecifierSet(one.metadata.get("Requires-Python", "")).contains(first)
    ]
    assert newer == []


def test_the_citation_has_the_version_of_the_project():
    citation = yaml.safe_load((TREE / "CITATION.cff").read_text())
    stated = re.search(r'^version = "(.+)"$', (TREE / "pyproject.toml").read_text(), re.MULTILINE)
    assert stated
    assert citation["version"] == stated[1]


def test_ci_runs_on_every_python_that_has_a_lock():
    workflow = yaml.safe_load((TREE / ".github" / "workflows" / "ci.yml").read_text())
    [job] = workflow["jobs"].values()
    locks = {
        f"constraints-py{one.replace('.', '')}.txt" for one in job["strategy"]["matrix"]["python"]
    }
    assert locks == {file.name for file in TREE.glob("constraints-py*.txt")}
