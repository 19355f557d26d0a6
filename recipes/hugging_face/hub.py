# SPDX-License-Identifier: Apache-2.0
"""A model by its name on the Hugging Face hub becomes a local folder; what it needs alone."""

from pathlib import Path

from data import hub
from recipes.hugging_face.safetensors_files import INDEX
from recipes.hugging_face.side_files import SIDE_FILES

_WEIGHTS = (INDEX, "model*.safetensors")


def local_folder(name: str, revision: str | None, *, weights: bool) -> Path:
    """Return the folder of this path, or of this name on the hub once it is downloaded.

    Without `weights` only the small files come, enough to refuse a model by. Raises ValueError for
    what is neither, and where the hub does not give it.
    """
    if revision is not None and Path(name).is_dir():
        raise ValueError(f"--revision {revision} is of a name on the hub; {name} is a folder")
    return hub.local_folder(name, (*SIDE_FILES, *(_WEIGHTS if weights else ())), revision)
