# SPDX-License-Identifier: Apache-2.0
"""The documents' code blocks run.

Every block fenced as `sh` or `python` runs in the root of the tree, in the order of its page,
unless the line before it says why not: `<!-- not run: reason -->`. `PAGES_TYPED_ON` is how
`make test-pythons` has them typed as a newcomer would, in processes that import all they need: in a
`pipe`, or on a pseudo-`terminal`.
"""

import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from data.cuda_extension import ARCHITECTURES
from tests import warm_start
from tests.every_python import TERMINAL, TYPED_ON, in_a_pipe, on_a_terminal
from tests.house.rooms import TREE

BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>\S.*?) -->\n)?^```(?P<language>sh|python)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PAGES = [TREE / "README.md", TREE / "CONTRIBUTING.md", *sorted((TREE / "docs").rglob("*.md"))]


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


def failure(block: Block) -> str:
    """Run a block and return what went wrong, or nothing."""
    command = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
    scripts = Path(sys.executable).parent
    typed_on = os.environ.get(TYPED_ON)
    variables = warm_start.cold() if typed_on else dict(os.environ)
    variables["PATH"] = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    if typed_on:
        variables.pop(ARCHITECTURES, None)  # the tests set it for themselves
    run = on_a_terminal if typed_on == TERMINAL else in_a_pipe
    code, shown = run([*command[block.language], block.code], TREE, variables)
    return f"{block.code}{shown}" if code else ""


@pytest.mark.timeout(1800)  # without the warm start, each block that needs NeMo imports it
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(TREE).as_posix())
def test_every_block_of_a_page_runs(page):
    run = [failure(block) for block in blocks(page.read_text()) if not block.reason]
    assert [text for text in run if text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(TREE).as_posix())
def test_every_fence_names_its_language(page):
    fences = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)
    assert set(fences[::2]) <= {"sh", "python", "text", "yaml"}
    assert set(fences[1::2]) <= {""}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(TREE).as_posix())
def test_every_relative_link_leads_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_a_block_is_run_unless_it_says_why_not():
    text = (
        "```sh\ntrue\n```\n\n<!-- not run: an hour -->\n```sh\nfalse\n```\n\n```text\nfalse\n```\n"
    )
    assert blocks(text) == [Block("sh", "true\n", ""), Block("sh", "false\n", "an hour")]


@pytest.mark.parametrize("language", ["sh", "python"])
def test_a_failing_block_is_noticed(language):
    code = {"sh": "echo seen; false | true\n", "python": "print('seen'); raise SystemExit(1)\n"}
    assert "seen" in failure(Block(language, code[language], ""))
