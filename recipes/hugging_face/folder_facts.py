# SPDX-License-Identifier: Apache-2.0
"""Facts of a Hugging Face folder that need no loading: its context, and whether it has changed."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from recipes.hugging_face.config import read_config
from recipes.hugging_face.config_fields import CONFIG
from recipes.hugging_face.positions import rotation_of


class FolderFacts(NamedTuple):
    """Facts of a folder."""

    context: int
    """Tokens that the model reads."""
    digest: str
    """SHA-256 of the configuration and of the weights' names, sizes and times."""


def folder_facts(folder: Path) -> FolderFacts:
    """Read the facts of a folder; raise ValueError if it is not a Hugging Face folder."""
    try:
        context = rotation_of(read_config(folder)).native_context
        digest = hashlib.sha256((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} is not a Hugging Face folder that can be read: {error}; `longhaul export` "
            "writes such a folder"
        ) from None
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        facts = file.stat()
        digest.update(f"{file.name} {facts.st_size} {facts.st_mtime_ns}".encode())
    return FolderFacts(context, digest.hexdigest())
