# SPDX-License-Identifier: Apache-2.0
"""Arguments of the data module for the positions of a stage."""

import math
from typing import Any

import nemo_run as run

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.skipped_positions import gene_scale, longrecipe, pose
from data.train_short.sentences import SentenceSelection
from recipes.spec.stage import Stage
from recipes.spec.train_short import Positions


def train_short(stage: Stage) -> dict[str, Any]:
    """Return the arguments of the data module that draw positions; none for consecutive ones.

    Raises ValueError if positions are GeNE's and the rotation has no factor of its own.
    """
    how = stage.positions
    match how.kind:
        case "consecutive":
            return {}
        case "pose":
            skips = run.Partial(pose, target_length=how.target_length, chunks=how.chunks)
            return {"positions": skips}
        case "longrecipe":
            skips = run.Partial(longrecipe, target_length=how.target_length)
            if how.sentences == "all":
                return {"positions": skips}
            chosen = run.Config(
                SentenceSelection,
                anchors=how.sentences,
                source_length=how.target_length,
                keep_others=how.keep_others,
            )
            return {"positions": skips, "sentences": chosen}
        case "gene":
            return {"rope_scale": _scales(how, stage.rope, stage.seq_length)}


def _scales(how: Positions, rope: RopeScaling | str, seq_length: int) -> run.Partial:
    """Return the draw of GeNE's scale: what the length needs and its multiples up to factor."""
    if not isinstance(rope, RopeScaling) or rope.original_length is None:
        raise ValueError(
            "positions gene draw the scale of the stage's own rotation; set its rope to "
            "custom_modules.rope.gene.gene_rotation"
        )
    if rope.reach != how.target_length:
        raise ValueError(
            f"positions gene have target_length {how.target_length:,} and rope reaches "
            f"{rope.reach:,}, factor {rope.factor:g} times original_length "
            f"{rope.original_length:,}; set both to the same length"
        )
    least = math.ceil(seq_length / rope.original_length)
    return run.Partial(gene_scale, least=least, scales=max(1, int(rope.factor // least)))
