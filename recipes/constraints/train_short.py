# SPDX-License-Identifier: Apache-2.0
"""Constraints between a stage's positions and its length, documents and rotation.

Pure functions of numbers, as in the other files of this folder.
"""

from collections.abc import Iterator

from custom_modules.rope.config import MAX_POSITION, RopeScaling
from custom_modules.rope.gene import gene_refusal


def violations(
    *,
    target_length: int | None,
    source_length: int | None,
    largest_scale: int | None,
    seq_length: int,
    documents: str,
    rope: RopeScaling,
) -> Iterator[str]:
    """Yield one sentence for each violated constraint of training short for a longer context.

    A None means that the stage does not do it: skip positions up to a target, choose sentences from
    a longer source, draw the rotation's scale up to the largest.
    """
    if target_length is not None:
        if not seq_length < target_length <= MAX_POSITION:
            yield (
                f"positions skip up to target_length {target_length:,}, and a sequence has "
                f"{seq_length:,} tokens; the target must be longer, and at most 2^31"
            )
        fixed = rope.method == "longrope" and (
            rope.short_factor == rope.long_factor or seq_length > (rope.original_length or 0)
        )
        if rope.by_length and not fixed:
            yield (
                f"positions skip, but rope {rope.method} depends on the sequence length: it would "
                f"rotate for {seq_length:,} tokens in training and for {target_length:,} after it; "
                "take ntk or yarn"
            )
    if source_length is not None and source_length < seq_length:
        yield (
            f"sentences are chosen from {source_length:,} tokens for a sequence of "
            f"{seq_length:,}; source_length must be at least as long"
        )
    if documents == "within" and (target_length is not None or source_length is not None):
        yield (
            "documents is within, where positions restart at each document; skipped positions need "
            "across"
        )
    if largest_scale is None:
        return
    if (why := gene_refusal(rope)) is not None:
        yield why
    elif (rope.reach or 0) <= seq_length:
        yield (
            f"a scale drawn by GeNE trains for the {rope.reach:,} tokens that rope reaches, and a "
            f"sequence has {seq_length:,}; the target must be longer"
        )
    elif largest_scale != rope.factor:
        yield (
            f"the largest scale drawn is {largest_scale} and rope factor {rope.factor:g}, which "
            "evaluation uses; take a multiple of the least scale, sequence length over "
            "original_length"
        )
