# SPDX-License-Identifier: Apache-2.0
"""Defaults of options in `longhaul.toml`, in the working folder or in the user's configuration.

Each key is the default of the option of its name; an option that is given wins, then the working
folder's file, then the user's. In `store`, `{card}` stands for the card's name; in `out`, so do
`{ladder}` and `{name}` (of both together). A cluster file is relative to the file that names it.
Light.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from data.files.user_file import read_text
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import family_name, run_folder, store_folder
from recipes.spec.stage import Ladder

FILE = "longhaul.toml"
PLACEHOLDERS = {"store": ("card",), "out": ("card", "ladder", "name")}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that a file may set."""

    cluster: str = ""
    account: str = ""
    partition: str = ""
    store: str = ""
    out: str = ""
    alert: str = ""
    track: str = ""
    """Names of trackers, with commas between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Default:
    """The value of an option, and the file that sets it."""

    value: str
    file: Path


def files() -> list[Path]:
    """Return the files that are read, the first of which wins."""
    configuration = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return [Path(FILE), Path(configuration) / "longhaul" / FILE]


def defaults() -> dict[str, Default]:
    """Return each option that a file sets; raise ValueError for a file that is malformed."""
    found: dict[str, Default] = {}
    for path in reversed(files()):
        if os.path.exists(path):
            found |= {name: Default(value=value, file=path) for name, value in _read(path).items()}
    return found


def default(option: str, given: str | None = None) -> str:
    """Return what was given for an option, or its default; empty if there is neither."""
    if given:
        return given
    found = defaults().get(option)
    return "" if found is None else os.path.expanduser(found.value)


def planned_cluster(given: str = "") -> str:
    """Return the cluster to plan for: the one given, or the default if its file states hardware.

    Returns an empty word if there is neither. A file without hardware still submits jobs.
    """
    from recipes.spec import cluster  # here: it imports yaml

    name = given or default("cluster")
    if given or not name or cluster.states_hardware(name):
        return name
    return ""


def store_of(card: ModelCard, given: Path | None = None) -> Path:
    """Return the token store: the one given, the default, or the conventional one."""
    return given or _folder("store", {"card": card.name}) or store_folder(card)


def run_of(card: ModelCard, ladder: Ladder, given: Path | None = None) -> Path:
    """Return the run folder: the one given, the default, or the conventional one."""
    names = {"card": card.name, "ladder": ladder.name, "name": family_name(card, ladder)}
    return given or _folder("out", names) or run_folder(card, ladder)


def _folder(option: str, names: Mapping[str, str]) -> Path | None:
    word = default(option)
    for name, value in names.items():
        word = word.replace(f"{{{name}}}", value)
    return Path(word) if word else None


def _read(path: Path) -> dict[str, str]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    from recipes.spec.schema import decode

    try:
        content: dict[str, Any] = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    options = decode(Options, content, str(path))
    said = {field.name: getattr(options, field.name) for field in fields(Options)}
    for name in content:
        if not said[name]:
            raise ValueError(f"{path}: {name} is empty; give it a value, or leave it out")
    for name, placeholders in PLACEHOLDERS.items():
        _require_placeholders(path, name, said[name], placeholders)
    if said["cluster"].endswith((".yaml", ".yml")):
        said["cluster"] = str(path.parent / os.path.expanduser(said["cluster"]))
    return {name: said[name] for name in content}


def _require_placeholders(path: Path, name: str, word: str, known: tuple[str, ...]) -> None:
    """Raise ValueError for a word in braces that stands for nothing, and for a brace alone."""
    left = word
    for each in known:
        left = left.replace(f"{{{each}}}", "")
    found = re.search(r"\{[^{}]*\}|[{}]", left)
    if found is not None:
        shown = ", ".join(f"{{{each}}}" for each in known)
        raise ValueError(f"{path}: {name} has {found[0]}; it may have {shown}")
