# SPDX-License-Identifier: Apache-2.0
"""Recipes as YAML files, which `--to-yaml` writes and `--yaml` reads.

The format is nemo-run's (`_target_`, `_partial_`, `_call_`). Its reader is not used: it turns the
file into command-line words and loses empty strings and `None`. Building a recipe imports and calls
what the file names, and a file may be a stranger's. So only our packages and parts of the libraries
are accepted, and of functions only ours, not yet called: NeMo has functions and tokenizers that run
code which other files name. For the same reason a file states no `resume.restore_config`, by which
NeMo reads what a checkpoint says of its tokenizer; `resume.start` reads weights alone.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nemo_run as run
from nemo.collections import llm
from nemo_run.core.serialization.yaml import YamlSerializer

import recipes.nemo2.signatures  # noqa: F401  # before the first config of a NeMo class
from data.files.user_file import read_yaml
from data.files.whole import write_text
from recipes.resolved.values import missing, wrong_types
from recipes.spec.moved_names import current_name

OWN = ("recipes", "custom_modules", "data")
TRUSTED = (
    *OWN,
    "nemo.collections.llm.api",
    "nemo.collections.llm.gpt.model",
    "nemo.lightning.nemo_logger",
    "nemo.lightning.pytorch",
    "megatron.core",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.plugins",
    "lightning.pytorch.profilers",
)
"""Packages that a file may name."""


def dump(recipe: run.Partial) -> str:
    """Return the resolved recipe as YAML, keys sorted."""
    return str(YamlSerializer().serialize(recipe))


def write(recipe: run.Partial, path: Path) -> None:
    """Write the resolved recipe atomically."""
    write_text(path, dump(recipe))


def read(path: Path) -> run.Partial:
    """Return the recipe in the file; raise ValueError for invalid content."""
    content = read_yaml(path)
    recipe = _node(content, str(path))
    if not isinstance(recipe, run.Partial) or recipe.__fn_or_cls__ is not llm.pretrain:
        raise ValueError(
            f"{path} holds no recipe: its top level is not a partial of llm.pretrain; `longhaul "
            "show NAME --to-yaml FILE` writes one"
        )
    if getattr(recipe.resume, "restore_config", None) is not None:
        raise ValueError(
            f"{path}: resume.restore_config may read more than weights; state resume.start"
        )
    problems = [*missing(recipe)] or [*wrong_types(recipe)]
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}")
    return recipe


def _node(content: Any, where: str) -> Any:
    if isinstance(content, list):
        return [_node(value, f"{where}[{index}]") for index, value in enumerate(content)]
    if not isinstance(content, dict):
        return content
    if "_target_" not in content:
        return {key: _node(value, f"{where}.{key}") for key, value in content.items()}
    target = _import(content["_target_"], where)
    if content.get("_call_") is False:
        _require_class(target, content["_target_"], where, called=False)
        return target
    kind = run.Partial if content.get("_partial_") else run.Config
    _require_class(target, content["_target_"], where, called=kind is run.Config)
    arguments = {
        key: _node(value, f"{where}.{key}")
        for key, value in content.items()
        if key not in ("_target_", "_partial_")
    }
    try:
        return kind(target, **arguments)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{where}: {error}") from error


def _require_class(target: Any, name: str, where: str, *, called: bool) -> None:
    """Raise ValueError for a function, unless it is ours and not called yet, or the training."""
    ours = not called and _is_below(name, OWN) and _is_below(_home(target), OWN)
    if not isinstance(target, type) and not ours and target is not llm.pretrain:
        raise ValueError(
            f"{where}: _target_ {name!r} is a function; name a class, or a function of "
            f"{', '.join(OWN)} with _partial_: true or _call_: false"
        )


def _is_below(name: str, rooms: Sequence[str]) -> bool:
    return name.startswith(tuple(f"{room}." for room in rooms))


def _home(target: Any) -> str:
    """Return the module that defines a class or function, with a dot."""
    return f"{getattr(target, '__module__', '')}."


def _import(name: Any, where: str) -> Any:
    """Return the class or function of a dotted name under one of the trusted packages."""
    if not isinstance(name, str) or not _is_below(name, TRUSTED):
        raise ValueError(
            f"{where}: _target_ {name!r} is not from a package that recipes may use; use one of "
            f"{', '.join(TRUSTED)}"
        )
    module, _, attribute = current_name(name).rpartition(".")
    try:
        target = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{where}: _target_ {name!r} cannot be imported: {error}") from error
    home = _home(target)
    if not _is_below(home, TRUSTED):
        raise ValueError(f"{where}: _target_ {name!r} is defined in {home[:-1]}; leave it out")
    return target
