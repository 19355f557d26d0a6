# SPDX-License-Identifier: Apache-2.0
"""Files of rotations, which `longhaul rope search` writes and a Stage can use.

    {"format": "longhaul rope", "version": 1, "rope": {"method": "longrope", ...}, "about": {...}}

`rope` is `RopeScaling.to_dict`. `about` records its origin (checkpoint, store, scores, seed) for
people: nothing is computed from it. A config.json of Hugging Face is read as well.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from custom_modules.rope.config import RopeScaling
from data.files.user_file import read_json
from data.files.whole import write_text
from recipes.hugging_face.rope import RECORD

FORMAT, VERSION = "longhaul rope", 1
_OF_HUGGING_FACE = ("rope_theta", "rope_scaling", "rope_parameters", RECORD)


def write(path: Path, rope: RopeScaling, about: Mapping[str, Any]) -> None:
    """Write the rotation and its origin atomically."""
    content = {"format": FORMAT, "version": VERSION, "rope": rope.to_dict(), "about": dict(about)}
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read(path: Path) -> RopeScaling:
    """Return the rotation of a rotation file or of a config.json.

    Raises ValueError, with the path, if the file has no rotation or an unknown one.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}; a rotation is a JSON object")
    try:
        return _rope(content)
    except (ValueError, TypeError, KeyError) as error:  # the latter two: a value of another type
        raise ValueError(f"{path}: {error}") from error


def _rope(content: dict[str, Any]) -> RopeScaling:
    if "format" not in content:
        if any(key in content for key in _OF_HUGGING_FACE):
            from recipes.hugging_face.positions import native_rope  # here: it imports safetensors

            return native_rope(content)
        raise ValueError(
            f"it has no rotation: it is neither a file of format {FORMAT!r}, as `longhaul rope "
            "search` writes, nor a config.json with rope_theta or rope_scaling"
        )
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']!r}; it must be {FORMAT!r}")
    if content.get("version") != VERSION:
        raise ValueError(
            f"its version is {content.get('version')!r} and this Longhaul reads {VERSION}; run "
            "`longhaul rope search` again"
        )
    if not isinstance(content.get("rope"), dict):
        raise ValueError("it has no rope, the description of the rotation")
    return RopeScaling.from_dict(content["rope"])
