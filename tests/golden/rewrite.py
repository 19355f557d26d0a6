# SPDX-License-Identifier: Apache-2.0
"""Rewrite the golden files: the resolved tree of every shipped recipe, as YAML."""

from pathlib import Path

RECIPES = Path(__file__).parent / "recipes"


def resolved() -> dict[str, str]:
    """Return the YAML of each shipped recipe by its name."""
    from recipes import yaml_file
    from recipes.factories import FACTORIES

    return {name: yaml_file.dump(factory()) for name, factory in FACTORIES.items()}


if __name__ == "__main__":
    RECIPES.mkdir(exist_ok=True)
    for stale in RECIPES.glob("*.yaml"):
        stale.unlink()
    for name, text in resolved().items():
        (RECIPES / f"{name}.yaml").write_text(text)
