# SPDX-License-Identifier: Apache-2.0
"""Rewrite the golden files: resolved trees of shipped recipes as YAML, the last of each ladder."""

from pathlib import Path

RECIPES = Path(__file__).parent / "recipes"


def resolved() -> dict[str, str]:
    """Return the YAML of the longest recipe of each ladder by its name, of tiny all."""
    from recipes import yaml_file
    from recipes.collection import ROWS
    from recipes.factories import FACTORIES

    chosen = [name for name, row in ROWS.items() if row.ladder.name == "tiny"]
    chosen += {row.ladder.name: name for name, row in ROWS.items()}.values()
    return {name: yaml_file.dump(FACTORIES[name]()) for name in dict.fromkeys(chosen)}


if __name__ == "__main__":
    RECIPES.mkdir(exist_ok=True)
    for stale in RECIPES.glob("*.yaml"):
        stale.unlink()
    for name, text in resolved().items():
        (RECIPES / f"{name}.yaml").write_text(text)
