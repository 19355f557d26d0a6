# SPDX-License-Identifier: Apache-2.0
"""The mix of a rehearsal's small stage."""

from dataclasses import replace

from data.mixture.config import Mix


def smaller_mix(mix: Mix, whole: int, small: int) -> Mix:
    """Return the mix for sequences of `small` tokens instead of `whole`, of any documents.

    Shares are dropped: the store of a rehearsal has one source, whose documents are short.
    """
    others = [
        replace(other, seq_length=max(1, small // (whole // other.seq_length)))
        for other in mix.other_lengths
        if small % (whole // other.seq_length) == 0 and small > whole // other.seq_length
    ]
    return replace(
        mix, shares=(), long_from=None, most_repeats=None, other_lengths=others, separator="",
        overlap=mix.overlap * small // whole,
    )  # fmt: skip
