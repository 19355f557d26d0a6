# SPDX-License-Identifier: Apache-2.0
"""Inputs of the first job of a chain, which makes the store, as absolute paths; light.

A job runs in a folder of its own, where a relative path would name another file.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from data.prepare import prepare
from data.readers import HUB_PREFIX
from data.store import Manifest, is_store
from longhaul.jobs.ladder_run import LadderRun
from recipes.spec.gate import GateShutError

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.A)
"""A model of the Hugging Face hub: `NAME` or `OWNER/NAME`."""


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The inputs of a store that does not exist yet."""

    source: str | None
    tokenizer: str | None
    vocab_size: int


def documents_of(plan: LadderRun, source: str | None, tokenizer: str | None) -> Documents | None:
    """Return the inputs of the store, or None if the store exists.

    Raises ValueError for documents or a tokenizer that do not exist, and if none are named.
    """
    if plan.store.exists():
        if source is not None:
            raise ValueError(f"there is a store at {plan.store}; leave out --source, or --store")
        return None
    if plan.card.hf_id is not None and source is None:
        raise ValueError(
            f"there is no token store at {plan.store}; name --source DOCUMENTS to make one first"
        )
    return Documents(
        source=_source(source),
        tokenizer=_tokenizer(tokenizer or plan.card.hf_id),
        vocab_size=plan.card.vocab,
    )


def _source(word: str | None) -> str | None:
    if word is None or word.startswith(HUB_PREFIX):
        return word
    path = Path(word).resolve()
    if not path.exists():
        raise ValueError(
            f"--source {word} is not there ({path}); name a file, a folder, or hf:NAME of the hub"
        )
    return str(path)


def _tokenizer(word: str | None) -> str | None:
    """Return the absolute path of a folder, or else a name of the hub as it is."""
    if word is None:
        return None
    path = Path(word).resolve()
    if path.exists():
        return str(path)
    if HUB_NAME.fullmatch(word):
        return word
    raise ValueError(
        f"--tokenizer {word} is not there ({path}); name a folder, or a model of the hub as "
        "OWNER/NAME"
    )


def require_heldout(manifest: Manifest, length: int) -> None:
    """Raise ValueError if no held-out document is longer than a length to evaluate at."""
    if manifest.heldout.longest <= length:
        raise ValueError(
            f"the longest held-out document of {manifest.root} has "
            f"{manifest.heldout.longest:,} tokens; evaluation at {length:,} needs a longer one: "
            "prepare a store from longer documents or with a larger --heldout-fraction; `longhaul "
            "evaluate` takes fewer tokens by --lengths"
        )


def prepare_for(
    length: int, *, source: str | None, out: str, tokenizer: str | None, vocab_size: int
) -> None:
    """Make a store for stages of up to `length` tokens, unless it exists.

    A requeued job thus succeeds. Raises GateShutError, which ends the chain, for a store that
    could not be evaluated at that length.
    """
    if not is_store(Path(out)):
        prepare(source, out, tokenizer=tokenizer, vocab_size=vocab_size)
    manifest = Manifest.load(out)
    try:
        require_heldout(manifest, length)
    except ValueError as error:
        raise GateShutError(str(error)) from None
