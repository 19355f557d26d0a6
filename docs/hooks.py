# SPDX-License-Identifier: Apache-2.0
"""MkDocs hooks: generate the pages that are not files of docs/, and rewrite links that leave docs/.

The README is the first page. Benchmark results and the API reference are pages too. mkdocstrings
fills the API pages from the source files; the build imports neither Longhaul nor torch nor NeMo.

A page links to a file of the repository by its relative path, which a code host follows. On the
site such a link leads to the page made of that file, or to the API reference of a module. A link
to any other file becomes plain text. A link to a file that does not exist is left as it is, so
that the strict build refuses it.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOMS = ("recipes", "custom_modules", "data", "slurm", "eval", "longhaul")
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files of the repository and the pages made of them; benchmark results are added to these."""
RESULTS = "benchmarks/results"

FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"^<!-- not run: .*? -->\n", re.MULTILINE)
SOURCE = '<details class="mkdocstrings-source">'
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the benchmark results and the API reference to the navigation."""
    tree = _tree(config)
    results = [page for file, page in _pages(tree).items() if file.startswith(RESULTS)]
    rooms: dict[str, list[Any]] = {}
    for room, part, _ in _parts(tree):
        uri = _api_page(room, part)
        rooms.setdefault(room, []).append({part: uri} if part else uri)
    reference = [{room: pages} for room, pages in rooms.items()]
    if config.nav is not None:
        config.nav += [{"Benchmarks": results}, {"API": reference}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    tree = _tree(config)
    pages = {page: (tree / file).read_text(encoding="utf-8") for file, page in _pages(tree).items()}
    pages |= {_api_page(room, part): _api(room, part, names) for room, part, names in _parts(tree)}
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page with links that the site can follow, and without notes for the test suite."""
    tree = _tree(config)
    pages = _pages(tree)
    uri = page.file.src_uri
    source = {page: file for file, page in pages.items()}.get(uri, f"docs/{uri}")

    def link(match: re.Match[str]) -> str:
        image, label, path, anchor = match.groups(default="")
        file = normpath(join(dirname(source), path))
        target = pages.get(file, file.removeprefix("docs/"))
        if (tree / file).is_file() and file.endswith(".py") and file.split("/")[0] in ROOMS:
            target, anchor = _in_reference(file)
        if files.get_file_from_path(target) is not None:
            return f"{image}[{label}]({relpath(target, dirname(uri) or '.')}{anchor})"
        if not (tree / file).exists():
            return match[0]
        return f"`{label}`" if "/" in label else label

    pieces = FENCE.split(NOT_RUN.sub("", markdown))
    pieces[::2] = [LINK.sub(link, text) for text in pieces[::2]]
    return "".join(pieces)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page whose source code is left out of the search, which shows matches in full."""
    return html.replace(SOURCE, f"{SOURCE[:-1]} data-search-exclude>")


def _tree(config: MkDocsConfig) -> Path:
    """Return the root of the repository, where mkdocs.yml is."""
    return Path(config.config_file_path).resolve().parent


def _pages(tree: Path) -> dict[str, str]:
    """Return the page of each file outside docs/ that has one."""
    results = sorted((tree / RESULTS).glob("*.md"))
    found = {file: page for file, page in PAGES.items() if (tree / file).is_file()}
    return found | {f"{RESULTS}/{file.name}": f"benchmarks/{file.name}" for file in results}


def _parts(tree: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield a room, a folder in it (empty for the files directly in the room), and its modules."""
    for room in ROOMS:
        modules: dict[str, list[str]] = {}
        for path in sorted((tree / room).rglob("*.py")):
            file = path.relative_to(tree).as_posix()
            modules.setdefault(_part(file), []).append(_module(file))
        for part in sorted(modules):
            yield room, part, sorted(modules[part])


def _part(file: str) -> str:
    """Return the folder of its room that a file is in, empty for one directly in the room."""
    _, *folders, _ = file.split("/")
    return folders[0] if folders else ""


def _module(file: str) -> str:
    """Return the dotted name of a source file."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _in_reference(file: str) -> tuple[str, str]:
    """Return the API page of a source file and its place on it, which a package lacks."""
    anchor = "" if file.endswith("/__init__.py") else f"#{_module(file)}"
    return _api_page(file.split("/")[0], _part(file)), anchor


def _api_page(room: str, part: str) -> str:
    return f"api/{room}/{part or 'index'}.md"


def _api(room: str, part: str, names: list[str]) -> str:
    """Return the API page of a folder: its docstring, then each of its modules."""
    package = f"{room}.{part}" if part else room
    untitled = "    options: {show_root_heading: false, show_root_toc_entry: false, members: false}"
    modules = [f"::: {name}\n" for name in names if name != package]
    return "\n".join([f"# {package}\n", f"::: {package}\n{untitled}\n", *modules])
