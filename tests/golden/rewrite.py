# SPDX-License-Identifier: Apache-2.0
"""Rewrite the golden files.

Resolved trees of shipped recipes as YAML: the last of each ladder, one of each kind of FP8, and
every other variant; batch scripts of a dry run.
"""

import tempfile
from pathlib import Path

RECIPES = Path(__file__).parent / "recipes"
SCRIPTS = Path(__file__).parent / "scripts"


def resolved() -> dict[str, str]:
    """Return the YAML by name: the longest recipe of each ladder, all of tiny, and variants."""
    from recipes.resolved import yaml_file
    from recipes.shipped.factories import FACTORIES
    from recipes.shipped.table import ROWS

    chosen = [name for name, row in ROWS.items() if row.ladder.name == "tiny"]
    in_fp8 = {row.layout.fp8.recipe: name for name, row in ROWS.items() if row.variant == "fp8"}
    chosen += {row.ladder.name: name for name, row in ROWS.items() if not row.variant}.values()
    chosen += [name for name, row in ROWS.items() if row.variant not in ("", "fp8")]
    chosen += in_fp8.values()
    return {name: yaml_file.dump(FACTORIES[name]()) for name in dict.fromkeys(chosen)}


def write_scripts() -> None:
    """Write the scripts of each number of nodes into a folder."""
    from tests.slurm.support.scripts_of import NODES, dry_scripts

    for nodes in NODES:
        folder = SCRIPTS / f"{nodes}_nodes"
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("*.sh"):
            stale.unlink()
        with tempfile.TemporaryDirectory() as place:
            for name, text in dry_scripts(Path(place), nodes).items():
                (folder / f"{name}.sh").write_text(text)


if __name__ == "__main__":
    RECIPES.mkdir(exist_ok=True)
    for stale in RECIPES.glob("*.yaml"):
        stale.unlink()
    for name, text in resolved().items():
        (RECIPES / f"{name}.yaml").write_text(text)
    write_scripts()
