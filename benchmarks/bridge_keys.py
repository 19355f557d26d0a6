# SPDX-License-Identifier: Apache-2.0
"""Keys of recipes exported for Megatron-Bridge, compared with Bridge's source without importing it.

    python -m benchmarks.bridge_keys FOLDER [RECIPE ...]

`FOLDER` is a `site-packages` with megatron-bridge and megatron-core, such as that of
`.pythons/megatron-bridge`. Each `_target_` of a recipe's tree is looked up in the source, and each
of its keys in the fields of that dataclass and its bases, or in the parameters of that function.
Says nothing about values, which `benchmarks.bridge_build` has Bridge validate.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from recipes.megatron_bridge.config import container, refusals
from recipes.shipped.table import ROWS

TREE = Path(__file__).resolve().parents[1]
OF_HYDRA = ("_target_", "_partial_", "_call_")


class Source:
    """Classes and functions of packages, read as text."""

    def __init__(self, folder: Path) -> None:
        self.folders = (folder, TREE)

    @cache  # noqa: B019  one source lives as long as the program
    def module(self, name: str) -> ast.Module | None:
        """Return a module, or None if it is not there."""
        for folder in self.folders:
            path = folder.joinpath(*name.split("."))
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if file.exists():
                    return ast.parse(file.read_text())
        return None

    def find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """Return where a name is defined, through imports, and its definition."""
        tree = self.module(module)
        for node in () if tree is None else ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
        for each in reversed([] if tree is None else tree.body):  # the last import of a name holds
            if not isinstance(each, ast.ImportFrom):
                continue
            for alias in each.names:
                if (alias.asname or alias.name) == name:
                    return self.find(self._absolute(module, each), alias.name)
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        """Return the module that an import in another names."""
        package = any(folder.joinpath(*module.split(".")).is_dir() for folder in self.folders)
        up = node.level - package
        parts = module.split(".")[: -up or None] if node.level else []
        return ".".join([*parts, *([node.module] if node.module else [])])

    def keys(self, target: str) -> set[str] | None:
        """Return the keys that a target takes; None for one that is not in these packages."""
        found = self.find(*target.rsplit(".", 1))
        return None if found is None else self._keys(*found)

    def _keys(self, module: str, node: ast.stmt) -> set[str]:
        if isinstance(node, ast.FunctionDef):
            return {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
        assert isinstance(node, ast.ClassDef)
        names = {
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        for each in node.bases:
            base = each.value if isinstance(each, ast.Subscript) else each
            if isinstance(base, ast.Name) and (found := self.find(module, base.id)):
                names |= self._keys(*found)
        return names


def unknown(tree: dict[str, Any], source: Source, at: str = "") -> Iterator[str]:
    """Yield a sentence for each key that its target does not take, and each unknown target."""
    target = tree.get("_target_", "")
    known = source.keys(target)
    if known is None and not target.startswith("torch."):
        yield f"{at or 'the tree'}: {target} is not in the source"
    for key, value in tree.items():
        if key not in OF_HYDRA and known is not None and key not in known:
            yield f"{at}{key} is not a key of {target}"
        if isinstance(value, dict):
            yield from unknown(value, source, f"{at}{key}.")


def main() -> int:
    """Compare recipes, by default all that are exported; return 1 if a key is unknown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bridge_keys", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("recipes", nargs="*")
    asked = parser.parse_args()
    source, wrong, compared = Source(asked.folder), 0, 0
    for row in [ROWS[name] for name in asked.recipes] or list(ROWS.values()):
        if [*refusals(row.card, row.stage, row.layout)]:
            continue
        compared += 1
        for line in unknown(container(row.card, row.ladder, row.seq_length, row.layout), source):
            print(f"{row.name}: {line}")
            wrong += 1
    print(f"{compared} recipes, {wrong} unknown keys")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
