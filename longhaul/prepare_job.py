# SPDX-License-Identifier: Apache-2.0
"""A store as the first job of a chain makes it, and what evaluation needs of any store."""

from pathlib import Path

from data.prepare import prepare
from data.store import Manifest, is_store
from recipes.spec.gate import GateShutError


def require_heldout(manifest: Manifest, length: int) -> None:
    """Raise ValueError where no held-out document is longer than a length to evaluate at."""
    if manifest.heldout.longest <= length:
        raise ValueError(
            f"the longest held-out document of {manifest.root} has "
            f"{manifest.heldout.longest:,} tokens; evaluation at {length:,} needs a longer one"
        )


def prepare_for(
    length: int, *, source: str | None, out: str, tokenizer: str | None, vocab_size: int
) -> None:
    """Make a store for stages of up to `length` tokens; one that is there already is taken.

    So a job that is queued again ends well. Raises GateShutError, which ends the chain, for a store
    that could not be evaluated at that length.
    """
    if not is_store(Path(out)):
        prepare(source, out, tokenizer=tokenizer, vocab_size=vocab_size)
    manifest = Manifest.load(out)
    try:
        require_heldout(manifest, length)
    except ValueError as error:
        raise GateShutError(str(error)) from None
