# SPDX-License-Identifier: Apache-2.0
"""Files of a Hugging Face folder other than weights and config.json."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.hub import LOADED_FROM, matching

SIDE_FILES = ("generation_config.json", *LOADED_FROM)
"""Patterns of the files that an import keeps and an export returns unchanged."""

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
UNLIMITED = 10**18
"""A model_max_length above it means no limit: transformers writes 10**30."""


def copy_side_files(source: Path, to: Path) -> None:
    """Copy the side files into a folder, which is created, with the folders that they are in."""
    for file in matching(source, SIDE_FILES):
        copy = to / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def raise_model_max_length(folder: Path, length: int) -> None:
    """Raise the maximum length of tokenizer and generation of a folder to at least `length`."""
    file = folder / TOKENIZER_CONFIG
    content = _json(file)
    stated = content.get("model_max_length")
    if not (isinstance(stated, int | float) and length <= stated < UNLIMITED):
        write_json(file, {**content, "model_max_length": length})
    generation = _json(folder / GENERATION_CONFIG)
    if generation.get("max_length") is not None and generation["max_length"] < length:
        write_json(folder / GENERATION_CONFIG, {**generation, "max_length": length})


def special_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of the tokenizer's special tokens by their names in config.json."""
    stated = _json(folder / TOKENIZER_CONFIG)
    ids = {one["content"]: one["id"] for one in _json(folder / TOKENIZER)["added_tokens"]}
    names = {kind: stated.get(f"{kind}_token") for kind in ("bos", "eos", "pad")}
    texts = {kind: one["content"] if isinstance(one, dict) else one for kind, one in names.items()}
    return {f"{kind}_token_id": ids[text] for kind, text in texts.items() if text in ids}


def _json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object as Hugging Face does: indented by two, not escaped to ASCII."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
