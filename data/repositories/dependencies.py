# SPDX-License-Identifier: Apache-2.0
"""Order the files of a repository so that a Python file follows the files that it imports.

Files are visited in the order of their paths, and each is written after the files that it imports
(a depth-first search, in which every file appears once). An import that leads back to a file whose
imports are being visited is ignored; this breaks each cycle at the file that was reached first.
Files of other languages are ordered by path.

Imports are those that run when a module is loaded, so not those in functions or below
`if TYPE_CHECKING`. A name is looked up from the folders above the file that are not packages, the
nearest first, and then from `src`, `lib` and `python` in the repository.
"""

import ast
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

PYTHON = frozenset({".py", ".pyi"})
SOURCE_ROOTS = ("src", "lib", "python")

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
    """Return the files that each Python file imports; paths are relative to the repository."""
    paths = frozenset(texts)
    return {
        path: set(_imports(path, text, paths)) - {path}
        for path, text in texts.items()
        if PurePosixPath(path).suffix.lower() in PYTHON
    }


def _imports(path: str, text: str, paths: frozenset[str]) -> Iterator[str]:
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
                yield from _module(_roots(folder, paths), alias.name, paths)
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
                yield from _module(roots, name, paths)


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


def _module(roots: list[PurePosixPath], name: str, paths: frozenset[str]) -> list[str]:
    """Return the file that a dotted name is: of the whole name, else of the nearest package."""
    parts = [part for part in name.split(".") if part != "*"]
    for size in range(len(parts), -1, -1):
        for root in roots:
            place = root.joinpath(*parts[:size])
            names = [place / "__init__.py"]
            if size:
                names = [place.with_name(f"{place.name}{end}") for end in (".py", ".pyi")] + names
            elif len(roots) > 1:
                continue  # the package of an absolute import has a name
            for file in map(str, names):
                if file in paths:
                    return [file]
    return []
