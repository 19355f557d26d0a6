# SPDX-License-Identifier: Apache-2.0
"""The tree as the house tests see it: rooms, modules, and what each imports."""

import ast
from collections.abc import Iterator
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
ROOMS = ("longhaul", "recipes", "custom_modules", "data", "slurm", "eval")


def modules(tree: Path, room: str) -> Iterator[tuple[str, Path]]:
    """Yield the dotted name and file of each module of a room."""
    for file in sorted((tree / room).rglob("*.py")):
        parts = file.relative_to(tree).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


def imports(name: str, file: Path) -> Iterator[str]:
    """Yield the absolute dotted names a module imports, at any depth and by import_module."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                parents = package.split(".")
                source = parents[: len(parents) - node.level + 1] if node.level else []
                source += [node.module] if node.module else []
                yield from (".".join([*source, alias.name]) for alias in node.names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(target)), *_],
            ):
                yield target
