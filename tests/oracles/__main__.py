# SPDX-License-Identifier: Apache-2.0
"""Run the oracles on the base and on this tree, and print what differs; exit code 1: something."""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from typer import echo

from . import quick, whole
from .command import AS_HERE, FOLDER, table
from .compare import Explanation, differences, unused
from .record import digest

TREE = FOLDER.parents[1]
PLACE = TREE / ".oracles"
START = "import sys; sys.path.append({!r}); from oracles.record import main; main()"
SUITES = {"quick": quick, "whole": whole}
SHOWN = 40


def machine() -> str:
    """Return what records are of: processor, torch and Python."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2] for line in lines if line.startswith("model name")), "")
    return f"{model.strip()}, torch {version('torch')}, Python {platform.python_version()}"


def base_tree(commit: str) -> Path:
    """Return the work tree of a commit, made where there is none."""
    place = PLACE / commit[:12]
    if not (place / ".git").exists():
        _git("worktree", "prune")
        _git("worktree", "add", "--quiet", "--detach", str(place), commit)
    return place


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=TREE, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def run(suite: str, names: list[str], tree: Path, records: Path, old: Path) -> None:
    """Run oracles of a suite on a tree, each into a record; `old` are the records of the base."""
    records.mkdir(parents=True, exist_ok=True)
    left_out = ("FORCE_COLOR", "TTY_COMPATIBLE", AS_HERE, "PYTHONSAFEPATH")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {
        "PYTHONPATH": os.pathsep.join([*SUITES[suite].BEFORE, str(tree)]),
        "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore",
        "COLUMNS": "200", "HF_HUB_OFFLINE": "1", **SUITES[suite].environment(PLACE, old),
        **({} if records == old else {AS_HERE: "1"}),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as empty, (records / f"{suite}.log").open("w") as log:
        subprocess.run(
            [sys.executable, "-c", START.format(str(FOLDER.parent)), tree, suite, records, *names],
            env=environment, cwd=empty, check=True, stdout=log, stderr=log,
        )  # fmt: skip


def read(records: Path, name: str) -> dict[str, Any]:
    """Return the record of an oracle; empty if there is none."""
    path = records / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def compared(
    name: str, base: dict[str, Any], here: dict[str, Any], explained: list[Explanation]
) -> bool:
    """Print how an oracle's records compare; return whether they do."""
    for of, record in (("the base", base), ("this tree", here)):
        if "entries" not in record:
            echo(f"{name}: fails on {of}: {record.get('error', 'no record')}")
            return False
    if broken := [
        of
        for of, one in base["entries"].items()
        if isinstance(one, dict) and one.keys() == {"error"}
    ]:
        echo(f"{name}: the base has only errors to compare for {', '.join(broken)}")
        return False
    found = differences(name, base["entries"], here["entries"], explained)
    wrong = [one for one in found if not one.reworded]
    for one in [*wrong[:SHOWN], *(one for one in found if one.reworded)]:
        echo(one)
    said = f"{len(wrong)} differences" if wrong else "equal"
    reworded = len(found) - len(wrong)
    echo(
        f"{name}: {len(here['entries'])} entries, {said}"
        f"{f', {reworded} messages reworded' if reworded else ''}; "
        f"{here['seconds']} s of CPU (base {base['seconds']})"
    )
    return not wrong


def main() -> None:
    """Run and compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracles", description=__doc__)
    parser.add_argument("names", nargs="*", help="oracles; without: all quick ones")
    parser.add_argument("--all", action="store_true", help="run those that take long as well")
    parser.add_argument("--base", default="", help="commit; without: base.txt")
    given = parser.parse_args()
    commit = _git("rev-parse", given.base or (FOLDER / "base.txt").read_text().strip())
    of = hashlib.sha256(machine().encode()).hexdigest()[:8]
    old, new = PLACE / "records" / f"{commit[:12]}-{of}", PLACE / "records" / "here"
    explained = [Explanation.of(one) for one in table("renames.yaml")]
    echo(f"base {commit[:12]} on {machine()}")
    equal, ran = True, list[str]()
    for suite, module in SUITES.items():
        names = chosen(suite, module, given.names, everything=given.all)
        stale = [
            name for name in names
            if read(old, name).get("digest") != digest(suite, name, module.TABLES.get(name, ()))
            or "error" in read(old, name)
        ]  # fmt: skip
        for name in names:
            (new / f"{name}.json").unlink(missing_ok=True)
        if stale:
            run(suite, stale, base_tree(commit), old, old)
        if names:
            run(suite, names, TREE, new, old)
        for name in names:
            equal &= compared(name, read(old, name), read(new, name), explained)
        ran += names
    for one in unused(explained, ran):
        equal = False
        echo(f"renames.yaml: explains nothing: {one}")
    sys.exit(not equal)


def chosen(suite: str, module: ModuleType, names: list[str], *, everything: bool) -> list[str]:
    """Return the oracles of a suite that are to run."""
    if names:
        return [name for name in module.ORACLES if name in names]
    return list(module.ORACLES) if everything or suite == "quick" else []


if __name__ == "__main__":
    main()
