# SPDX-License-Identifier: Apache-2.0
"""Download the requested files of a model on the Hugging Face hub to a local folder.

One call downloads all files: without network it fails at once, whereas a library that looks for
each file by itself retries every one, for most of a minute.
"""

import re
from collections.abc import Sequence
from pathlib import Path

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "*.tiktoken", "tekken.json", "normalizer.json", "chat_template.*",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
"""Patterns of the files that a tokenizer with a Rust backend is loaded from, except config.json.

They are needed before anything is downloaded; a test compares them with what transformers reads.
"""
LOADED_FROM = ("config.json", *TOKENIZER_FILES)
"""Patterns of all files that a tokenizer is loaded from."""
_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
OF_THE_HUB = "hf:"
"""Prefix of a name on the hub, where a shipped name or a folder is accepted as well."""


class HubError(ValueError):
    """A name that is neither a folder nor an accessible model; the message says what to do."""


def matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files of a folder that one of the patterns names, sorted."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(found)


def local_folder(name: str, patterns: Sequence[str], revision: str | None = None) -> Path:
    """Return the folder at this path, or the one that a model of this name is downloaded to."""
    if Path(name).is_dir():
        return Path(name)
    if Path(name).exists():
        raise HubError(f"{name} is a file; name the folder that holds the model's files")
    name = name.removeprefix(OF_THE_HUB) or name
    if not _NAME.fullmatch(name):
        raise HubError(
            f"there is no folder {name}, and it is not a Hugging Face hub name such as "
            "meta-llama/Llama-3.1-8B"
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
            "the Hugging Face hub shows you no such model: check the spelling; for a private "
            "model run `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"on the Hugging Face hub it has no revision {revision}; name another"
    said = " ".join(str(error).split())[:200]
    reason = "" if isinstance(error, errors.LocalEntryNotFoundError) else f" ({said})"
    return (
        f"the Hugging Face hub cannot be reached{reason}: without network, name a folder; a gated "
        "model needs `hf auth login` first"
    )
