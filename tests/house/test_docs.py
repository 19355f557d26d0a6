# SPDX-License-Identifier: Apache-2.0
"""The site of `make docs` builds without a warning, and a broken link stops the build."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.house.rooms import ROOMS, TREE, modules

pytestmark = pytest.mark.skipif(
    find_spec("mkdocs") is None,
    reason="MkDocs is not installed; the extra docs has it: pip install -e '.[docs]'",
)

WITHOUT_HEAVY = """
import runpy, sys
for name in ("torch", "nemo", "megatron", "longhaul", "recipes"):
    sys.modules[name] = None
runpy.run_module("mkdocs", run_name="__main__")
"""
"""MkDocs in a process that cannot import what the pages are about."""


def build(tree: Path, site: Path) -> tuple[int, str]:
    """Build the site of a tree; return MkDocs' exit code, and its lines but those of progress."""
    words = ["build", "--config-file", str(tree / "mkdocs.yml"), "--site-dir", str(site)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HEAVY, *words],
        cwd=tree,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if not line.startswith("INFO ")]
    return done.returncode, "\n".join(lines)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build the site of this tree."""
    folder = tmp_path_factory.mktemp("site")
    assert build(TREE, folder) == (0, "")
    return folder


@pytest.fixture
def small_tree(tmp_path) -> Path:
    """Return a tree with one page, one module and the real configuration but its navigation."""
    config = yaml.safe_load((TREE / "mkdocs.yml").read_text())
    del config["nav"]
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    (tmp_path / "docs").mkdir()
    shutil.copy(TREE / "docs" / "hooks.py", tmp_path / "docs")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").write_text('"""Documents."""\n')
    (tmp_path / "data" / "store.py").write_text('"""Tokens."""\n')
    (tmp_path / "LICENSE").write_text("Apache-2.0\n")
    return tmp_path


def page(tree: Path, links: Iterable[str]) -> tuple[int, str]:
    """Write the first page with links and build the site."""
    lines = [f"See [this]({link})." for link in links]
    (tree / "README.md").write_text("\n\n".join(["# Longhaul", "## Use it", *lines]) + "\n")
    return build(tree, tree / "site")


@pytest.mark.nightly  # `make docs` builds it too; links of pages are those of test_readme
@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning(site):
    assert "extends the context window" in (site / "index.html").read_text()
    assert (site / "search" / "search_index.json").stat().st_size > 0


@pytest.mark.nightly
@pytest.mark.parametrize("room", ROOMS)
def test_every_module_has_its_place_in_the_reference(site, room):
    pages = [site / "api" / room / "index.html", *(site / "api" / room).glob("*.html")]
    text = "".join(page.read_text() for page in pages)
    names = [name for name, file in modules(TREE, room) if file.name != "__init__.py"]
    assert names
    assert [name for name in names if f'id="{name}"' not in text] == []


def test_a_broken_link_is_refused(small_tree):
    links = {
        "docs/gone.md": "'docs/gone.md', but the target is not found",
        "data/gone.py": "'data/gone.py', but the target is not found",
        "CONTRIBUTING.md": "'CONTRIBUTING.md', but the target is not found",
        "#gone": "'#gone', but there is no such anchor",
    }
    code, said = page(small_tree, links)
    assert (code, said.count("WARNING")) == (1, len(links)), said
    assert [link for link, warning in links.items() if warning not in said] == [], said


def test_a_link_that_leads_somewhere_is_kept(small_tree):
    links = {
        "#use-it": 'See <a href="#use-it">this</a>.',
        "data/store.py": 'href="api/data/index.html#data.store">this</a>',
        "data/__init__.py": 'href="api/data/index.html">this</a>',
        "LICENSE": "See this.",
    }
    assert page(small_tree, links) == (0, "")
    text = (small_tree / "site" / "index.html").read_text()
    assert [link for link, shown in links.items() if shown not in text] == []
