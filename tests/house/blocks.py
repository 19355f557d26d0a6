# SPDX-License-Identifier: Apache-2.0
"""The code blocks of the documents, and how a block is typed."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from data.cuda_extension import ARCHITECTURES
from tests import warm_start
from tests.every_python import TERMINAL, TYPED_ON, in_a_pipe, on_a_terminal
from tests.house.rooms import TREE

BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>\S.*?) -->\n)?^```(?P<language>sh|python)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PAGES = [TREE / "README.md", TREE / "CONTRIBUTING.md", *sorted((TREE / "docs").rglob("*.md"))]
OF_USERS = [TREE / "docs" / f"{name}.md" for name in ("dgx_cluster", "one_gpu", "laptop")]
"""Pages from own data to an export, whose blocks need a folder, a model or a Slurm of their own."""


class Block(NamedTuple):
    """One fenced block of a page and why it is not run, empty where it is."""

    language: str
    code: str
    reason: str


def blocks(text: str) -> list[Block]:
    """Return the blocks of a page in their order."""
    return [
        Block(found["language"], found["code"], found["reason"] or "")
        for found in BLOCK.finditer(text)
    ]


def typed(
    block: Block, folder: Path = TREE, variables: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, str]:
    """Run a block in a folder; return its exit code and what it wrote.

    `variables` are added to the environment. In processes that import all they need, and on a
    pseudo-terminal, where PAGES_TYPED_ON says so.
    """
    command = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
    scripts = Path(sys.executable).parent
    typed_on = os.environ.get(TYPED_ON)
    environment = warm_start.cold() if typed_on else os.environ | warm_start.MORE
    environment |= variables
    environment["PATH"] = f"{scripts}{os.pathsep}{environment['PATH']}"
    if typed_on:
        environment.pop(ARCHITECTURES, None)  # the tests set it for themselves
    run = on_a_terminal if typed_on == TERMINAL else in_a_pipe
    return run([*command[block.language], block.code], folder, environment)


def failure(
    block: Block, folder: Path = TREE, variables: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Run a block and return what went wrong, or nothing."""
    code, shown = typed(block, folder, variables)
    return f"{block.code}{shown}" if code else ""
