# SPDX-License-Identifier: Apache-2.0
"""Defaults of options in `longhaul.toml`, in the working folder or in the user's configuration.

Each key is the default of the option of its name; an option that is given wins, then the working
folder's file, then the user's. In `store` and `out`, `{card}`, `{ladder}` and `{name}` (of card and
ladder together) stand for names. Light.
"""

import os
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from data.files.user_file import read_text
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import family_name, run_folder, store_folder
from recipes.spec.stage import Ladder

FILE = "longhaul.toml"
PLACEHOLDERS = ("card", "ladder", "name")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that a file may set."""

    cluster: str = ""
    account: str = ""
    partition: str = ""
    store: str = ""
    out: str = ""


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


def store_of(card: ModelCard, ladder: Ladder | None = None, given: Path | None = None) -> Path:
    """Return the token store: the one given, the default, or the conventional one."""
    return given or _folder("store", card, ladder) or store_folder(card)


def run_of(card: ModelCard, ladder: Ladder, given: Path | None = None) -> Path:
    """Return the run folder: the one given, the default, or the conventional one."""
    return given or _folder("out", card, ladder) or run_folder(card, ladder)


def _folder(option: str, card: ModelCard, ladder: Ladder | None) -> Path | None:
    word = default(option)
    if not word:
        return None
    names = {"card": card.name}
    if ladder is not None:
        names |= {"ladder": ladder.name, "name": family_name(card, ladder)}
    for name in PLACEHOLDERS:
        word = word.replace(f"{{{name}}}", names.get(name, card.name))
    return Path(word)


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
    for name in ("store", "out"):
        _require_placeholders(path, name, said[name])
    return {name: said[name] for name in content}


def _require_placeholders(path: Path, name: str, word: str) -> None:
    unknown = [each for each in re.findall(r"\{([^{}]*)\}", word) if each not in PLACEHOLDERS]
    if unknown:
        shown = ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)
        raise ValueError(f"{path}: {name} has {{{unknown[0]}}}; it may have {shown}")
