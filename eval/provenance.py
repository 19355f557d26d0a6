# SPDX-License-Identifier: Apache-2.0
"""How an evaluation came about: when, by which command and code, on which model and tokenizer."""

from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

SHORT = 12
"""Characters of a fingerprint or a commit that are shown."""


@dataclass(frozen=True)
class Provenance:
    """Facts of one evaluation; what is empty or None is not known.

    Args:
        date: Of its end, in UTC.
        commit: Of Longhaul, with `and changes` if its files differed.
        command: As it was typed.
        seeds: Of each thing that is drawn.
        tokenizer: Name and fingerprint of the store's tokenizer.
        parameters: Of the model, without rows that pad the vocabulary.
        tokens_seen: In training up to the evaluated step, over the stages of this run that led to
            it; 0 for a base model.
        rotation: In effect, read from the built model: its SHA-256 and what
            `custom_modules.rope.in_effect.RotationInEffect.summary` has.
    """

    date: str = ""
    commit: str = ""
    command: str = ""
    seeds: dict[str, int] = field(default_factory=dict)
    tokenizer: str = ""
    parameters: int | None = None
    tokens_seen: int | None = None
    rotation: dict[str, Any] = field(default_factory=dict)

    @property
    def short_commit(self) -> str:
        """The commit without most of its hash."""
        hash_, _, changes = self.commit.partition(" ")
        return f"{hash_[:SHORT]} {changes}".rstrip()


def now() -> str:
    """Return the date and time in UTC, to the minute."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
