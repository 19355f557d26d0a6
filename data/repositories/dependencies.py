# SPDX-License-Identifier: Apache-2.0
"""Order the files of a repository so that a file follows the files that it imports.

Files are visited in the order of their paths, and each is written after the files that it imports
(a depth-first search, in which every file appears once). An import that leads back to a file whose
imports are being visited is ignored; this breaks each cycle at the file that was reached first.
Files that are not Python, C or C++ are ordered by path.

Python: the imports that run when a module is loaded, so not those in functions or below
`if TYPE_CHECKING`. A name is looked up from the folders above the file that are not packages, the
nearest first, and then from `src`, `lib` and `python` in the repository. C and C++: `#include`,
looked up from the file's own folder, then at the end of every path.
"""

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

PYTHON = frozenset({".py", ".pyi"})
C_FAMILY = frozenset({
    ".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".cuh",
})  # fmt: skip
SOURCE_ROOTS = ("src", "lib", "python")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)

Imports = Mapping[str, Iterable[str]]


def in_order(paths: Iterable[str], imports: Imports) -> list[str]:
    """Return every path once, behind those that it imports."""
    ordered: dict[str, None] = {}
    begun: set[str] = set()
    for first in sorted(paths):
        # Not by recursion, which would end at some thousand files that import one another.
        visits = [(first, iter(sorted(imports.get(first, ()))))] if first not in begun else []
        begun.add(first)
        while visits:
            path, left = visits[-1]
            for needed in left:
                if needed not in begun:
                    begun.add(needed)
                    visits.append((needed, iter(sorted(imports.get(needed, ())))))
                    break
            else:
                ordered[path] = None
                visits.pop()
    return list(ordered)


def imports_of(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the files that each file imports; paths are relative to the repository."""
    paths = frozenset(texts)
    by_name: dict[str, list[str]] = {}
    for path in sorted(paths, key=lambda path: (path.count("/"), path)):
        by_name.setdefault(PurePosixPath(path).name, []).append(path)
    found: dict[str, set[str]] = {}
    for path, text in texts.items():
        ending = PurePosixPath(path).suffix.lower()
        if ending in PYTHON:
            found[path] = set(_python_imports(path, text, paths)) - {path}
        elif ending in C_FAMILY:
            found[path] = set(_includes(path, text, paths, by_name)) - {path}
    return found


def _python_imports(path: str, text: str, paths: frozenset[str]) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of string escapes in the user's files
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # of another Python, or too deep: by path
    folder = PurePosixPath(path).parent
    for statement in _loaded_statements(tree.body):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield from _first(_modules(_roots(folder, paths), alias.name, paths))
        elif isinstance(statement, ast.ImportFrom):
            if statement.level:
                above = [folder, *folder.parents]
                if statement.level > len(above):
                    continue
                roots = [above[statement.level - 1]]
            else:
                roots = _roots(folder, paths)
            package = statement.module or ""
            for alias in statement.names:
                name = f"{package}.{alias.name}".strip(".")
                yield from _first(_modules(roots, name, paths))


def _loaded_statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is loaded."""
    for statement in body:
        if isinstance(statement, ast.If):
            if "TYPE_CHECKING" not in ast.dump(statement.test):
                yield from _loaded_statements(statement.body)
            yield from _loaded_statements(statement.orelse)
        elif isinstance(statement, ast.Try):
            handlers = [inner for handler in statement.handlers for inner in handler.body]
            inside = [*statement.body, *handlers, *statement.orelse, *statement.finalbody]
            yield from _loaded_statements(inside)
        elif isinstance(statement, ast.With | ast.ClassDef):
            yield from _loaded_statements(statement.body)
        else:
            yield statement


def _roots(folder: PurePosixPath, paths: frozenset[str]) -> list[PurePosixPath]:
    """Return the folders from which an absolute import of a file is looked up."""
    above = [folder, *folder.parents]
    roots = [one for one in above if str(one / "__init__.py") not in paths]
    return [*roots, *(PurePosixPath(name) for name in SOURCE_ROOTS)]


def _modules(roots: Iterable[PurePosixPath], name: str, paths: frozenset[str]) -> Iterator[str]:
    """Yield the files that a dotted name may be: the whole name first, then its packages."""
    roots = list(roots)
    parts = [part for part in name.split(".") if part != "*"]
    for size in range(len(parts), -1, -1):
        for root in roots:
            place = root.joinpath(*parts[:size])
            names = [place / "__init__.py"]
            if size:
                names = [place.with_name(f"{place.name}{end}") for end in (".py", ".pyi")] + names
            elif len(roots) > 1:
                continue  # the package of an absolute import has a name
            yield from (str(file) for file in names if str(file) in paths)


def _first(found: Iterator[str]) -> Iterator[str]:
    for path in found:
        yield path
        return


def _includes(
    path: str, text: str, paths: frozenset[str], by_name: Mapping[str, list[str]]
) -> Iterator[str]:
    folder = PurePosixPath(path).parent
    for match in INCLUDE.finditer(text):
        quoted, system = match.groups()
        name = _normal(folder / quoted) if quoted else ""
        if name in paths:
            yield name
            continue
        wanted = _normal(PurePosixPath(quoted or system))
        # A system's header has the name of a file here only if the file is meant to be included so.
        ends = [f"/{wanted}"] if quoted else [f"/include/{wanted}"]
        for other in by_name.get(PurePosixPath(wanted).name, ()):
            if other == wanted or any(f"/{other}".endswith(end) for end in ends):
                yield other
                break


def _normal(path: PurePosixPath) -> str:
    """Return a path without `.` and `..`; one that leads outside names no file here."""
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)
