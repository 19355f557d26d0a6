# SPDX-License-Identifier: Apache-2.0
"""The mix of a stage: shares of sources and document lengths, packing, and steps of other lengths.

Standard library only: stages and ladder files are light.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Optional, get_args

PackingKind = Literal["best_fit", "cut"]
MANY_REPEATS = 4.0
"""Repetitions of a document above which a warning is due: beyond four epochs repeated tokens are
worth clearly less than new ones (Muennighoff et al., arXiv 2305.16264)."""
USELESS_REPEATS = 40.0
"""Repetitions above which a mix is refused unless it states `most_repeats`: by the same paper, more
than some forty epochs add nothing."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Documents of one source and one range of lengths, with their share of the tokens."""

    source: str
    weight: float
    """Relative to the other shares of the mix."""
    end_weight: Optional[float] = None  # noqa: UP045  (nemo-run cannot parse X | None)
    """Weight at the end of the stage, if it moves; it moves from `Mix.ramp_from` on."""
    at_least: int = 1
    """Tokens of its shortest documents, a power of two."""
    below: Optional[int] = None  # noqa: UP045
    """Its documents have fewer tokens than this, a power of two."""

    def __post_init__(self) -> None:
        """Raise ValueError for weights that are not shares, and bounds that no bucket has."""
        for name in ("weight", "end_weight"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} of source {self.source} is {value}; it is 0 or more")
        for name in ("at_least", "below"):
            value = getattr(self, name)
            if value is not None and (value < 1 or value & (value - 1)):
                raise ValueError(
                    f"{name} of source {self.source} is {value:,}; documents are counted by powers "
                    f"of two, so it is one, such as {1 << max(0, value - 1).bit_length():,}"
                )
        if self.below is not None and self.below <= self.at_least:
            raise ValueError(
                f"source {self.source} has documents of at least {self.at_least:,} and fewer than "
                f"{self.below:,} tokens, which are none"
            )

    @property
    def final_weight(self) -> float:
        """Weight at the end of the stage."""
        return self.weight if self.end_weight is None else self.end_weight

    @property
    def words(self) -> str:
        """The documents, as a person names them."""
        low = f" from {self.at_least:,}" if self.at_least > 1 else ""
        high = f" below {self.below:,}" if self.below is not None else ""
        return f"{self.source}{low}{high}"


@dataclass(frozen=True, kw_only=True)
class OtherLength:
    """Steps of the stage that train sequences of another length."""

    seq_length: int
    steps: float
    """Share of the stage's steps."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Which documents a stage trains on, and how they fill its sequences."""

    shares: Sequence[Share] = ()
    """Empty: every source of the store, by its tokens."""
    ramp_from: float = 0.8
    """Share of the steps after which weights move, linearly, to `end_weight`; 0.8 is MiniMax-01's
    (arXiv 2501.08313), 0 moves them over the whole stage."""
    long_from: Optional[int] = None  # noqa: UP045
    """Documents of at least this many tokens are long; a power of two."""
    long_share: float = 0.5
    """Share of long documents in the tokens of every source, if `long_from` is given."""
    most_repeats: Optional[float] = None  # noqa: UP045
    """Times that a document may be seen in the stage; a mix that needs more is refused. None:
    `USELESS_REPEATS`, where sources or lengths have shares of their own."""
    other_lengths: Sequence[OtherLength] = ()
    """Steps of other lengths, with the same tokens a step."""
    packing: PackingKind = "best_fit"
    documents_per_row: Optional[int] = None  # noqa: UP045
    """Most documents of a sequence of the stage's length; fewer in shorter sequences."""
    overlap: int = 0
    """Tokens that two pieces of a document longer than the sequence share; best fit only."""
    separator: str = ""
    """Token that ends each document in place of the one of the store; empty keeps that."""

    def __post_init__(self) -> None:
        """Raise ValueError for a setting outside of its range, or one without effect."""
        for name in ("shares", "other_lengths"):  # YAML has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.packing not in get_args(PackingKind):
            raise ValueError(f"packing is {self.packing!r}; it is 'best_fit' or 'cut'")
        _require_apart(self.shares)
        if self.shares and not sum(share.weight for share in self.shares):
            raise ValueError("all weights of the mix are 0; give one source a weight")
        if self.shares and not sum(share.final_weight for share in self.shares):
            raise ValueError("all weights of the mix end at 0; give one source an end_weight")
        for name in ("ramp_from", "long_share"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; it lies between 0 and 1")
        if self.ramp_from == 1 and any(share.end_weight is not None for share in self.shares):
            raise ValueError("ramp_from is 1, so that no end_weight is reached; lower it")
        if self.long_from is not None and (
            self.long_from < 2 or self.long_from & (self.long_from - 1)
        ):
            raise ValueError(f"long_from is {self.long_from:,}; it is a power of two from 2 on")
        if self.most_repeats is not None and not self.most_repeats >= 1:
            raise ValueError(f"most_repeats is {self.most_repeats}; it is 1 or more")
        if self.documents_per_row is not None and self.documents_per_row < 1:
            raise ValueError(f"documents_per_row is {self.documents_per_row}; it is 1 or more")
        if self.overlap < 0 or (self.overlap and self.packing == "cut"):
            raise ValueError(
                f"overlap is {self.overlap} and packing {self.packing}; an overlap is 0 or more, "
                "and only best_fit has one"
            )
        if self.documents_per_row is not None and self.packing == "cut":
            raise ValueError("documents_per_row has no effect on packing 'cut'; use best_fit")
        if sum(other.steps for other in self.other_lengths) >= 1 or any(
            not 0 < other.steps < 1 for other in self.other_lengths
        ):
            raise ValueError(
                f"steps of other lengths are {[other.steps for other in self.other_lengths]}; each "
                "is a share of all steps, above 0, and they add up to less than 1"
            )

    @property
    def words(self) -> str:
        """The mix, as a person reads it."""
        total = sum(share.weight for share in self.shares)
        end = sum(share.final_weight for share in self.shares)
        shares = [
            f"{share.weight / total:.0%}"
            + (f" to {share.final_weight / end:.0%}" if self._moves else "")
            + f" {share.words}"
            for share in self.shares
        ] or ["sources by their tokens"]
        if self.long_from is not None:
            shares.append(f"{self.long_share:.0%} of each from {self.long_from:,} tokens")
        packing = "whole documents by best fit" if self.packing == "best_fit" else "cut end to end"
        others = [
            f"{other.steps:.0%} of steps at {other.seq_length:,}" for other in self.other_lengths
        ]
        return "; ".join([", ".join(shares), packing, *others])

    @property
    def _moves(self) -> bool:
        return any(share.end_weight not in (None, share.weight) for share in self.shares)

    def lengths(self, seq_length: int) -> tuple[int, ...]:
        """Return the sequence lengths of its steps, the stage's own first.

        Raises ValueError for one that does not divide the stage's.
        """
        for other in self.other_lengths:
            if not 1 < other.seq_length < seq_length or seq_length % other.seq_length:
                raise ValueError(
                    f"other_lengths has {other.seq_length:,}, which is not a whole part of the "
                    f"stage's {seq_length:,} tokens"
                )
            if self.overlap >= other.seq_length:
                raise ValueError(
                    f"overlap is {self.overlap:,}, not less than {other.seq_length:,} tokens"
                )
        if self.overlap >= seq_length:
            raise ValueError(f"overlap is {self.overlap:,}, not less than {seq_length:,} tokens")
        found = (seq_length, *(other.seq_length for other in self.other_lengths))
        if len(set(found)) < len(found):
            raise ValueError(f"the lengths of steps are {found}; state each once")
        return found


def _require_apart(shares: Sequence[Share]) -> None:
    """Raise ValueError if a document is in two shares: it would be seen more often than it says."""
    for number, share in enumerate(shares):
        for other in shares[:number]:
            low = max(share.at_least, other.at_least)
            high = min(share.below or math.inf, other.below or math.inf)
            if share.source == other.source and low < high:
                raise ValueError(
                    f"two shares of the mix have documents in common, {other.words} and "
                    f"{share.words}; set at_least and below so that they do not"
                )
