# SPDX-License-Identifier: Apache-2.0
"""The documents' code blocks run.

Every block fenced as `sh` or `python` runs in the root of the tree, in the order of its page,
unless the line before it says why not: `<!-- not run: reason -->`. `PAGES_TYPED_ON` is how
`make test-pythons` has them typed as a newcomer would, in processes that import all they need: in a
`pipe`, or on a pseudo-`terminal`. The pages of one user each are typed by `test_user_pages.py`, and
the one of a cluster by `tests/slurm/test_dgx_page.py`.
"""

import re

import pytest

from tests.house.blocks import OF_USERS, PAGES, Block, blocks, failure
from tests.house.rooms import TREE

TYPED_HERE = [page for page in PAGES if page not in OF_USERS]
TESTED_ELSEWHERE = ("profiling.md", "context_parallelism.md")
"""Pages whose commands other tests run (`tests/runs/test_profile.py`,
`tests/longhaul/commands/test_probe.py`); their blocks run nightly."""


@pytest.mark.timeout(1800)  # without the warm start, each block that needs NeMo imports it
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=page.relative_to(TREE).as_posix(),
            marks=pytest.mark.nightly if page.name in TESTED_ELSEWHERE else (),
        )
        for page in TYPED_HERE
    ],
)
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
