# SPDX-License-Identifier: Apache-2.0
"""The rotation that a checkpoint was trained with, as its marker records it.

    "rope"        how the stage is configured
    "pattern"     which layers differ, if any do
    "rotation"    what the built model rotated by (`custom_modules.rope.in_effect`)

Markers of earlier versions and of imports have no `rotation`: it is not recorded, which is no
error. A checkpoint whose two facts disagree was trained with another rotation than configured, or
its marker was changed; it is used for nothing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from custom_modules.checkpoints.index import CheckpointError
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.in_effect import RotationInEffect
from custom_modules.rope.layers import LayerPattern
from custom_modules.rope.rotary import stated_rotation
from recipes.checkpoints.marker import MARKER, PATTERN, ROTATION, checkpoint_facts


class RotationError(ValueError):
    """A model that rotates by other frequencies than it should."""


def recorded_rotation(checkpoint: Path) -> RotationInEffect | None:
    """Return what the model of a checkpoint rotated by; None if that is not recorded.

    Raises CheckpointError if the record was changed.
    """
    content = (checkpoint_facts(checkpoint) or {}).get(ROTATION)
    if content is None:
        return None
    try:
        return RotationInEffect.from_dict(content)
    except ValueError as error:
        path = checkpoint / MARKER
        raise CheckpointError(
            f"the rotation in {path} is damaged ({error}); restore the file from a copy, or train "
            "again from an earlier checkpoint",
            path=path,
        ) from None


def pattern_in(facts: Mapping[str, Any]) -> LayerPattern | None:
    """Return which layers differ in the model of a marker's facts; None if none does."""
    content = facts.get(PATTERN)
    return None if content is None else LayerPattern.from_dict(content)


def rotation_before(checkpoint: Path) -> RotationInEffect | None:
    """Return what a checkpoint was trained with: what its marker records, else what it states.

    None if it does neither. Raises RotationError if the two disagree.
    """
    facts = checkpoint_facts(checkpoint) or {}
    found = recorded_rotation(checkpoint)
    if found is None or "rope" not in facts:
        return found
    length = int(facts["seq_length"]) if found.length is None else found.length
    rope, pattern = RopeScaling.from_dict(facts["rope"]), pattern_in(facts)
    stated = stated_rotation(rope, found.head_dim, length, pattern)
    why = found.difference(stated)
    if why:
        raise RotationError(
            f"{checkpoint} was trained with another rotation than its stage configures: {why}; "
            "train that stage again, or start from another checkpoint"
        )
    return found


def require_recorded(checkpoint: Path, built: RotationInEffect, what: str) -> None:
    """Raise RotationError unless a built model rotates as the checkpoint that it is loaded from.

    A rotation that is not recorded passes. `what` names the model in the message.
    """
    found = recorded_rotation(checkpoint)
    why = "" if found is None else built.difference(found)
    if why:
        raise RotationError(
            f"{what} rotates otherwise than {checkpoint} was trained: {why}; restore the recipe "
            "that it was trained with"
        )
