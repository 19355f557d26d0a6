# SPDX-License-Identifier: Apache-2.0
"""Who may import whom."""

import os
import re
import subprocess
import sys
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
    "benchmarks": {"recipes", "custom_modules", "data", "eval"},
}
KERNELS_OF = {  # packages that a module adapts, imported where they are installed
    "custom_modules.attention.flash_attn": {"flash_attn", "flash_attn_interface"},
    "custom_modules.gpt.fp8_recompute": {"transformer_engine"},
    "custom_modules.attention.transformer_engine": {"transformer_engine"},
}
BUILT_FROM_SOURCE = {"flash_attn_interface"}  # FlashAttention 3: no distribution to declare
HEAVY = {"torch", "nemo", "nemo_run", "megatron", "lightning", "transformer_engine", "transformers"}
HEAVY_RECIPES = {
    "recipes.resolved.check",
    "recipes.nemo2.checkpoint_callback",
    "recipes.shipped.factories",
    "recipes.nemo2.model",
    "recipes.hugging_face.export",
    "recipes.hugging_face.import_",
    "recipes.hugging_face.convert",
    "recipes.checkpoints.merge",
    "recipes.resolved.single_step",
    "recipes.pretrain",
    "recipes.nemo2.lr_schedule",
    "recipes.nemo2.signatures",
    "recipes.nemo2.strategy",
    "recipes.checkpoints.streamed_weights",
    "recipes.resolved.values",
    "recipes.nemo2.train_short",
    "recipes.checkpoints.verified",
    "recipes.checkpoints.weight_checksums",
    "recipes.resolved.ineffective",
    "recipes.resolved.yaml_file",
}


def forbidden_imports(tree: Path) -> list[str]:
    """List every import that the rules of the house refuse, as `module imports target`."""
    refused = []
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
                elif name in light_recipes(tree):
                    allowed = top not in HEAVY
                else:
                    allowed = True
                if not allowed:
                    refused.append(f"{name} imports {target}")
    return refused


def light_recipes(tree: Path) -> list[str]:
    """List the recipe modules that answer without torch."""
    return [name for name, _ in modules(tree, "recipes") if name not in HEAVY_RECIPES]


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
                if top in sys.stdlib_module_names or top in (*ROOMS, *BUILT_FROM_SOURCE):
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
    file.parent.mkdir(parents=True)
    for folder in [file.parent, *file.parent.parents]:
        if folder == tree:
            break
        (folder / "__init__.py").touch()
    file.write_text(source)


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
        ("slurm.executors", "from eval import gate"),
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
