# SPDX-License-Identifier: Apache-2.0
"""Facts of a Hugging Face folder that need no loading: its context, and whether it has changed."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple


class FolderFacts(NamedTuple):
    """Facts of a folder."""

    context: int
    """Tokens that the model reads."""
    digest: str
    """SHA-256 of the configuration and of the weights' names, sizes and times."""


def folder_facts(folder: Path) -> FolderFacts:
    """Read the facts of a folder; raise ValueError if it is not a Hugging Face folder."""
    try:
        config = (folder / "config.json").read_bytes()
        context = int(json.loads(config)["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} is not a Hugging Face folder: it has no config.json with "
            f"max_position_embeddings ({type(error).__name__}: {error}); `longhaul export` writes "
            "such a folder"
        ) from None
    digest = hashlib.sha256(config)
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        facts = file.stat()
        digest.update(f"{file.name} {facts.st_size} {facts.st_mtime_ns}".encode())
    return FolderFacts(context, digest.hexdigest())
