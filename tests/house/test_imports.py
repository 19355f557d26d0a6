# SPDX-License-Identifier: Apache-2.0
"""Who may import whom."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

from tests.house.rooms import ROOMS, TREE, imports, modules

ROOMS_SEEN_FROM = {
    "longhaul": {"recipes", "custom_modules", "data", "slurm", "eval"},
    "slurm": {"recipes", "custom_modules", "data"},
    "eval": {"recipes", "custom_modules", "data"},
    "recipes": {"custom_modules", "data"},
    "custom_modules": set(),
    "data": set(),
    "benchmarks": {"recipes", "custom_modules", "data", "eval", "examples"},
    "examples": {"data"},
}
KERNELS_OF = {  # packages that a module adapts, imported where they are installed
    "custom_modules.attention.flash_attn": {"flash_attn", "flash_attn_interface"},
    "custom_modules.gpt.fp8_recompute": {"transformer_engine"},
    "custom_modules.attention.transformer_engine": {"transformer_engine"},
}
NEWER = {"tomllib"}
"""In the standard library from Python 3.11 on; `tomli` is imported before that."""
BUILT_FROM_SOURCE = {"flash_attn_interface"}  # FlashAttention 3: no distribution to declare
HEAVY = {"torch", "nemo", "nemo_run", "megatron", "lightning", "transformer_engine", "transformers"}
HEAVY_RECIPES = (  # rooms and modules that need torch or NeMo; all other recipes answer without
    "recipes.nemo2",
    "recipes.resolved",
    "recipes.pretrain",
    "recipes.shipped.factories",
    "recipes.checkpoints.average",
    "recipes.checkpoints.rotation",
    "recipes.checkpoints.streamed_weights",
    "recipes.checkpoints.verified",
    "recipes.checkpoints.weight_checksums",
    "recipes.hugging_face.as_computed",
    "recipes.hugging_face.convert",
    "recipes.hugging_face.export",
    "recipes.hugging_face.import_",
)
SEES_ALONE = {  # rooms of a room that see no other of its rooms than these
    "recipes.spec": set(),
    "recipes.constraints": {"recipes.spec"},
    "recipes.checkpoints": set(),
    "recipes.planner": {"recipes.spec", "recipes.constraints"},
    "longhaul.defaults": set(),
    "longhaul.health": set(),
    "longhaul.terminal": {"longhaul.defaults"},
    "longhaul.jobs": {
        "longhaul.defaults",
        "longhaul.health",
        "longhaul.terminal",
        "longhaul.version",
    },
    "longhaul.pages": {
        "longhaul.health",
        "longhaul.jobs",
        "longhaul.options",
        "longhaul.run_folder",
        "longhaul.terminal",
    },
}


def forbidden_imports(tree: Path) -> list[str]:
    """List every import that the rules of the house refuse, as `module imports target`."""
    refused, light = [], set(light_recipes(tree))
    for room, seen in ROOMS_SEEN_FROM.items():
        for name, file in modules(tree, room):
            for target in imports(name, file):
                top = target.partition(".")[0]
                if top in ROOMS_SEEN_FROM:
                    allowed = top in seen | {room}
                elif room == "custom_modules" and not name.startswith("custom_modules.callbacks"):
                    allowed = top in sys.stdlib_module_names | {"torch"} | KERNELS_OF.get(
                        name, set()
                    ) or f"{target}.".startswith("megatron.core.")
                elif name in light:
                    allowed = top not in HEAVY
                else:
                    allowed = True
                if not allowed:
                    refused.append(f"{name} imports {target}")
    return refused


def light_recipes(tree: Path) -> list[str]:
    """List the recipe modules that answer without torch."""
    return [name for name, _ in modules(tree, "recipes") if not within(name, HEAVY_RECIPES)]


def within(name: str, above: Iterable[str]) -> bool:
    """Return whether a dotted name is one of those, or lies below one."""
    return any(f"{name}.".startswith(f"{room}.") for room in above)


def arrows(tree: Path) -> dict[str, dict[str, str]]:
    """Return what each part of a room imports of the others, with one import as an example.

    A part is a folder or a file directly in a room: `recipes.planner`, `recipes.pretrain`.
    """
    parts = {
        ".".join(name.split(".")[:2])
        for room in ROOMS
        for name, _ in modules(tree, room)
        if "." in name
    }
    found: dict[str, dict[str, str]] = {part: {} for part in parts}
    for room in ROOMS:
        for name, file in modules(tree, room):
            own = ".".join(name.split(".")[:2])
            for target in imports(name, file):
                part = ".".join(target.split(".")[:2])
                if own in parts and part in parts and part != own and part.startswith(f"{room}."):
                    found[own][part] = f"{name} imports {target}"
    return found


def circles(graph: dict[str, dict[str, str]]) -> list[str]:
    """List an import of each part from which the part can be reached again."""
    reached = {part: set(targets) for part, targets in graph.items()}
    for middle in reached:
        for part, targets in reached.items():
            if middle in targets:
                reached[part] = targets | reached[middle]
    return sorted(
        example
        for part, targets in graph.items()
        for target, example in targets.items()
        if part in reached[target]
    )


def heavy_modules_after(names: list[str], tree: Path) -> str:
    """Import modules in a process of their own and name the first that brings a heavy one."""
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = sorted({HEAVY!r} & set(sys.modules))\n"
        "    if heavy:\n"
        "        sys.exit(f'{name} brings {heavy}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr


def undeclared_imports(tree: Path, declared: set[str]) -> list[str]:
    """List the imports of distributions that pyproject.toml does not name."""
    distributions = packages_distributions()
    missing = []
    for room in ROOMS:
        for name, file in modules(tree, room):
            for target in imports(name, file):
                top = target.partition(".")[0]
                if top in sys.stdlib_module_names | NEWER or top in (*ROOMS, *BUILT_FROM_SOURCE):
                    continue
                owners = {normal(owner) for owner in distributions.get(top, [top])}
                if not owners & declared:
                    missing.append(f"{name} imports {target} of {sorted(owners)}")
    return missing


def normal(distribution: str) -> str:
    """Return the one spelling under which distribution names are compared."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def declared_distributions() -> set[str]:
    """Return the names of the dependencies and extras of the installed distribution."""
    return {normal(re.match(r"[\w.-]+", text)[0]) for text in requires("longhaul-recipes")}


def plant(tree: Path, module: str, source: str) -> None:
    """Write one module, and the packages it lies in, beneath a tree."""
    file = tree.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    for folder in [file.parent, *file.parent.parents]:
        if folder == tree:
            break
        (folder / "__init__.py").touch()
    file.write_text(source)


@pytest.fixture(scope="module")
def graph():
    return arrows(TREE)


def test_every_import_obeys_the_rules_of_the_house():
    assert forbidden_imports(TREE) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("custom_modules.context_parallel.ring", "from nemo.collections import llm"),
        ("custom_modules.context_parallel.ring", "def adapter():\n    import lightning.pytorch"),
        ("custom_modules.context_parallel.ring", "from megatron import training"),
        ("custom_modules.context_parallel.ring", "from recipes.spec.layout import Layout"),
        ("custom_modules.callbacks.rate", "from longhaul import cli"),
        ("data.store", "import recipes.spec.units"),
        ("data.store", "from importlib import import_module\nimport_module('eval.report.page')"),
        ("recipes.spec.layout", "import torch"),
        ("recipes.models.tiny", "from transformers import AutoConfig"),
        ("recipes.pretrain", "from slurm import executors"),
        ("recipes.planner.memory", "from ... import slurm"),
        ("slurm.executors", "from eval.gates import gate"),
        ("eval.report.page", "from slurm import executors"),
        ("benchmarks.ring", "from longhaul import cli"),
    ],
)
def test_a_forbidden_import_is_refused(tmp_path, module, source):
    plant(tmp_path, module, source)
    assert len(forbidden_imports(tmp_path)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "custom_modules.context_parallel.ring",
            "import math\nimport torch\nfrom megatron.core import parallel_state",
        ),
        (
            "custom_modules.context_parallel.ring",
            "from megatron import core\nfrom . import ulysses",
        ),
        ("custom_modules.callbacks.rate", "from lightning.pytorch import Callback"),
        ("recipes.pretrain", "from nemo.collections import llm\nimport nemo_run as run"),
        ("recipes.spec.layout", "from .models import tiny\nfrom recipes.spec.units import K"),
        ("longhaul.commands.run", "from slurm import executors\nfrom eval import report"),
    ],
)
def test_an_allowed_import_passes(tmp_path, module, source):
    plant(tmp_path, module, source)
    assert forbidden_imports(tmp_path) == []


def test_rooms_of_a_room_go_in_no_circle(graph):
    assert circles(graph) == []


def test_a_circle_is_found(tmp_path):
    plant(tmp_path, "recipes.spec.layout", "from recipes.notation import layout")
    plant(tmp_path, "recipes.notation.layout", "from recipes.planner import search")
    plant(tmp_path, "recipes.planner.search", "from recipes.spec import layout")
    assert circles(arrows(tmp_path)) == [
        "recipes.notation.layout imports recipes.planner.search",
        "recipes.planner.search imports recipes.spec.layout",
        "recipes.spec.layout imports recipes.notation.layout",
    ]


@pytest.mark.parametrize("room", SEES_ALONE)
def test_a_low_room_sees_only_those_below_it(room, graph):
    seen = graph[room]
    assert [seen[target] for target in seen.keys() - SEES_ALONE[room]] == []


def test_only_the_command_line_imports_commands(graph):
    importers = {part for part, seen in graph.items() if "longhaul.commands" in seen}
    assert importers <= {"longhaul.cli"}


CATALOGUES = ("recipes.ladders", "recipes.models", "recipes.shipped")
"""Rooms whose packages list what lies in them."""


def test_rooms_within_rooms_import_nothing_by_themselves():
    rooms = [
        file
        for room in ROOMS
        for name, file in modules(TREE, room)
        if file.name == "__init__.py" and "." in name and name not in CATALOGUES
    ]
    assert rooms
    assert [str(file) for file in rooms if any(imports("", file))] == []


def test_light_recipes_load_nothing_heavy_at_any_depth():
    assert heavy_modules_after(light_recipes(TREE), TREE) == ""


def test_the_command_line_loads_nothing_heavy_before_a_command_runs():
    assert heavy_modules_after(["longhaul.cli"], TREE) == ""


def test_a_light_module_that_reaches_torch_through_another_is_named(tmp_path):
    plant(tmp_path, "recipes.spec.layout", "import recipes.pretrain")
    (tmp_path / "recipes" / "pretrain.py").write_text("import torch")
    assert "recipes.spec.layout brings" in heavy_modules_after(["recipes.spec.layout"], tmp_path)


def test_every_imported_distribution_is_declared():
    assert undeclared_imports(TREE, declared_distributions()) == []


def test_an_import_that_only_a_dependency_brings_is_refused(tmp_path):
    plant(tmp_path, "data.store", "import yaml")
    assert undeclared_imports(tmp_path, declared_distributions() - {"pyyaml"}) == [
        "data.store imports yaml of ['pyyaml']"
    ]
