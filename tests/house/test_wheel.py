# SPDX-License-Identifier: Apache-2.0
"""The wheel carries every room and works away from the tree."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.rooms import ROOMS, TREE, modules


def room_files(tree: Path) -> set[str]:
    """Return the files of all rooms, code and data, relative to the tree."""
    return {
        file.relative_to(tree).as_posix()
        for room in ROOMS
        for file in (tree / room).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Build the wheel from a copy of the tree and install it into a folder of its own."""
    source = tmp_path_factory.mktemp("source")
    for room in ROOMS:
        shutil.copytree(TREE / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(TREE / name, source)
    wheels, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source)]
    subprocess.run(pip + build, check=True)
    (wheel,) = wheels.iterdir()
    into = ["install", "--no-deps", "--no-index", "--no-compile", "--target", str(target)]
    subprocess.run([*pip, *into, str(wheel)], check=True)
    return target


def test_every_file_of_a_room_is_in_the_wheel(installed):
    assert room_files(TREE) - room_files(installed) == set()


def test_the_licence_is_in_the_wheel(installed):
    (licence,) = installed.glob("longhaul_recipes-*.dist-info/licenses/LICENSE")
    assert licence.read_text() == (TREE / "LICENSE").read_text()


def test_every_package_imports_from_a_foreign_directory(installed, tmp_path):
    packages = [
        name for room in ROOMS for name, file in modules(TREE, room) if file.stem == "__init__"
    ]
    code = (
        "import importlib, json\n"
        f"print(json.dumps([importlib.import_module(name).__file__ for name in {packages!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        stdout=subprocess.PIPE,
        check=True,
    )
    files = json.loads(done.stdout)
    assert len(files) == len(packages) >= len(ROOMS)
    assert [file for file in files if not Path(file).is_relative_to(installed)] == []


def test_the_console_command_answers_from_a_foreign_directory(installed, tmp_path):
    done = subprocess.run(
        [sys.executable, str(installed / "bin" / "longhaul"), "--help"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "Usage" in done.stdout) == (0, True), done.stderr


def test_a_ladder_of_one_s_own_is_written_and_planned_from_a_foreign_directory(installed, tmp_path):
    command = [sys.executable, str(installed / "bin" / "longhaul")]
    for words in (
        "ladders new mine.yaml --card llama31_8b --seq 256K",
        "ladders check mine.yaml --card llama31_8b",
        "plan llama31_8b --ladder mine.yaml --nodes 2",
        "show --card llama31_8b --ladder mine.yaml --stage 256K --nodes 2",
    ):
        done = subprocess.run(
            [*command, *words.split()],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
