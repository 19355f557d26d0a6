# SPDX-License-Identifier: Apache-2.0
"""Download the required files of a model from the Hugging Face hub."""

from pathlib import Path

from data import hub
from recipes.hugging_face.checksums import SUMS
from recipes.hugging_face.safetensors_files import INDEX
from recipes.hugging_face.side_files import SIDE_FILES

_WEIGHTS = (INDEX, "model*.safetensors")
FETCHED = (*SIDE_FILES, *_WEIGHTS)
"""Patterns of the files that are downloaded; their sums are too."""


def local_folder(name: str, revision: str | None, *, weights: bool) -> Path:
    """Return the folder of this path, or download the model of this name on the hub.

    Without `weights` only the small files are downloaded, which is enough to refuse a model. Raises
    ValueError if it is neither, and if the download fails.
    """
    if revision is not None and Path(name).is_dir():
        raise ValueError(f"--revision {revision} is only for names on the hub; {name} is a folder")
    return hub.local_folder(name, (*FETCHED, SUMS) if weights else SIDE_FILES, revision)
