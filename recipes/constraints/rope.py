# SPDX-License-Identifier: Apache-2.0
"""Constraints between a rotation, the context that it is used at, and the policy for documents."""

from collections.abc import Iterator

from custom_modules.rope.config import RopeScaling


def violations(rope: RopeScaling, *, documents: str) -> Iterator[str]:
    """Yield one sentence if the rotation depends on length and documents differ in length."""
    same_factors = rope.method == "longrope" and rope.short_factor == rope.long_factor
    if documents == "within" and rope.by_length and not same_factors:
        yield (
            f"documents is within, but rope {rope.method} depends on the sequence length: a short "
            "document would be rotated differently in a long sequence than alone; take documents "
            "across, or ntk or yarn"
        )


def unstretched(rope: RopeScaling, *, length: int) -> Iterator[str]:
    """Yield one sentence if a rotation does not match the context that it is used at."""
    if rope.original_length is None or rope.reach is None:
        return
    if rope.original_length > length:
        yield (
            f"rope original_length is {rope.original_length:,} and the context {length:,} tokens; "
            f"{rope.method} lowers frequencies for a context that is not reached"
        )
    elif rope.reach < length:
        yield (
            f"rope {rope.method} reaches {rope.reach:,} tokens, factor {rope.factor:g} times "
            f"original_length {rope.original_length:,}, and the context is {length:,}"
        )
