# SPDX-License-Identifier: Apache-2.0
"""A model by its name on the Hugging Face hub becomes a local folder with the files asked for.

The download is one call for all files: without network it fails at once, where each file that a
library looks for by itself is tried again and again, for most of a minute.
"""

import re
from collections.abc import Sequence
from pathlib import Path

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "chat_template.*",
)  # fmt: skip
"""By pattern: what a tokenizer is loaded from, but for the model's config.json."""
_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


class HubError(ValueError):
    """What is neither a folder nor a model that the hub gives; the message says what would do."""


def local_folder(name: str, patterns: Sequence[str], revision: str | None = None) -> Path:
    """Return the folder of this path, or of this name on the hub once its files are downloaded."""
    if Path(name).is_dir():
        return Path(name)
    if not _NAME.fullmatch(name):
        raise HubError(
            f"there is no folder {name}, and it is not a name on the Hugging Face hub, as "
            "meta-llama/Llama-3.1-8B is"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # the hub's client raises errors of several unrelated libraries
        raise HubError(f"{name} is not a folder here, and {_why(error, revision)}") from error


def _why(error: Exception, revision: str | None) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return (
            "on the Hugging Face hub it is gated: accept its terms on its page there, then run "
            "`hf auth login`"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "the Hugging Face hub shows you no such model: look at how it is spelled; for a "
            "private one run `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"on the Hugging Face hub it has no revision {revision}; name another"
    said = " ".join(str(error).split())[:200]
    reason = "" if isinstance(error, errors.LocalEntryNotFoundError) else f" ({said})"
    return (
        f"the Hugging Face hub cannot be reached{reason}: without network, name a folder; a gated "
        "model needs `hf auth login` first"
    )
