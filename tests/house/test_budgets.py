# SPDX-License-Identifier: Apache-2.0
"""No folder grows beyond its budget of lines: `budgets.toml`, where a raise has its reason."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.house.rooms import ROOMS, TREE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BUDGETS = tomllib.loads((TREE / "tests/house/budgets.toml").read_text())
WITHOUT_BUDGET = ("docs", "examples")
SHORT = 80
MAY_BE_SHORT = ("recipes/models/", "recipes/ladders/", "longhaul/commands/")


def sources(tree: Path) -> dict[str, str]:
    """Return the text of each Python file that is tracked or would be, by its path."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=tree, stdout=subprocess.PIPE, check=True,
    ).stdout.decode()  # fmt: skip
    paths = [name for name in listed.split("\0") if name and (tree / name).is_file()]
    return {name: (tree / name).read_text() for name in paths}


def over(counts: dict[str, int], budgets: dict[str, int]) -> list[str]:
    """Return a sentence for each folder with more than its budget, or without one."""
    return [
        f"{folder}: {count}, at most {budgets.get(folder, 0)}; delete, or raise it with a reason"
        for folder, count in sorted(counts.items())
        if count > budgets.get(folder, 0)
    ]


def lines(texts: dict[str, str]) -> dict[str, int]:
    """Return the lines of each folder."""
    counts: Counter[str] = Counter()
    for name, text in texts.items():
        counts[name.partition("/")[0]] += text.count("\n")
    return counts


def short_files(texts: dict[str, str]) -> list[str]:
    """Return the files of packages that have few lines, where one file is not one thing by rule."""
    return [
        name
        for name, text in texts.items()
        if name.partition("/")[0] in ROOMS
        and text.count("\n") < SHORT
        and not name.startswith(MAY_BE_SHORT)
        and not name.endswith("__init__.py")
    ]


def shared_names(texts: dict[str, str]) -> list[str]:
    """Return the public classes whose name a package has twice, as `package.Name`."""
    found: Counter[str] = Counter()
    for name, text in texts.items():
        room = name.partition("/")[0]
        if room in ROOMS:
            found.update(f"{room}.{one}" for one in classes(ast.parse(text).body))
    return sorted(name for name, number in found.items() if number > 1)


def classes(body: Iterable[ast.stmt]) -> list[str]:
    """Return the names of public classes."""
    names = [node.name for node in body if isinstance(node, ast.ClassDef)]
    return [name for name in names if not name.startswith("_")]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return sources(TREE)


def test_each_folder_keeps_to_its_budget_of_lines(texts):
    counted = {folder: n for folder, n in lines(texts).items() if folder not in WITHOUT_BUDGET}
    assert counted.keys() == BUDGETS["lines"].keys()
    assert not over(counted, BUDGETS["lines"])


def test_few_files_are_short(texts):
    assert len(short_files(texts)) <= BUDGETS["files"]["short"]


def test_few_classes_of_a_package_share_a_name(texts):
    assert len(shared_names(texts)) <= BUDGETS["files"]["shared_class_names"]


def test_what_is_over_a_budget_is_found():
    assert over({"data": 3, "eval": 2}, {"data": 2, "eval": 2}) == [
        "data: 3, at most 2; delete, or raise it with a reason"
    ]
    few = {"data/a.py": "class Part: ...\n", "data/b.py": "class Part: ...\n"}
    assert short_files(few) == list(few)
    assert shared_names(few) == ["data.Part"]
    assert shared_names({"data/a.py": "class Part: ...\n", "eval/a.py": "class Part: ...\n"}) == []
