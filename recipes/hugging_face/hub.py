# SPDX-License-Identifier: Apache-2.0
"""A model by its name on the Hugging Face hub becomes a local folder; what it needs alone."""

import re
from pathlib import Path

from recipes.hugging_face.folder import SIDE_FILES
from recipes.hugging_face.shards import INDEX

_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_WEIGHTS = (INDEX, "model*.safetensors")


def local_folder(name: str, revision: str | None, *, weights: bool) -> Path:
    """Return the folder of this path, or of this name on the hub once it is downloaded.

    Without `weights` only the small files come, enough to refuse a model by. Raises ValueError for
    what is neither, and where the hub does not give it.
    """
    if Path(name).is_dir():
        if revision is not None:
            raise ValueError(f"--revision {revision} is of a name on the hub; {name} is a folder")
        return Path(name)
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"there is no folder {name}, and it is not a name on the Hugging Face hub, as "
            "meta-llama/Llama-3.1-8B is"
        )
    from huggingface_hub import snapshot_download

    patterns = [*SIDE_FILES, *(_WEIGHTS if weights else ())]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises errors of several unrelated libraries
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{name} is no folder here, and the Hugging Face hub did not give it: {reason} "
            "(offline, name a folder; for a gated model, run `hf auth login` first)"
        ) from error
