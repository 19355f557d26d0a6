# SPDX-License-Identifier: Apache-2.0
"""The documents of a mix as groups: one for each source, range of lengths and sequence length.

A group is packed by itself, so that its weight holds in every step whatever else is in the mix.
Whether its documents suffice is read from the manifest's length buckets, without opening a token
file: a mix that cannot be had is refused before anything is packed.
"""

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from data.mixture.config import MANY_REPEATS, USELESS_REPEATS, Mix, Share
from data.splits import LengthBucket
from data.store import ONLY_SOURCE, Manifest

FEWEST = 32
"""Documents of a group that a length of steps needs for a part of its own; else it has all."""


class MixError(ValueError):
    """A mix that a store or a stage cannot have; the message says which number is at fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Documents that are packed together, and their weight in steps of their sequence length."""

    source: str
    at_least: int
    below: int | None
    seq_length: int
    weight: float
    end_weight: float
    documents: int
    """Of all lengths of steps."""
    tokens: int
    between: tuple[float, float] = (0.0, 1.0)
    """Which of the documents are for steps of this length, as a range of their hashes: those of
    the other lengths have the others, so that none is seen twice before all are seen once."""

    @property
    def words(self) -> str:
        """The documents, as a person names them."""
        return Share(source=self.source, weight=1.0, at_least=self.at_least, below=self.below).words


class Need(NamedTuple):
    """What a stage takes of documents of a group, over steps of all lengths."""

    words: str
    share: float
    """Of the stage's tokens."""
    tokens: int
    """That the stage takes."""
    held: int
    """That the store has."""

    @property
    def repeats(self) -> float:
        """Times that a token is seen."""
        return self.tokens / self.held


def applies(mix: Mix, manifest: Manifest) -> bool:
    """Return whether a store has the sources of a mix; False for a store of one unnamed source.

    Raises MixError for a store that has other sources, or some of them only.
    """
    named = [share.source for share in mix.shares]
    have = [source.name for source in manifest.sources]
    missing = sorted(set(named) - set(have))
    if not missing:
        return True
    if have == [ONLY_SOURCE]:
        return False
    raise MixError(
        f"the store {manifest.root} has no source {', '.join(missing)}, which the mix takes; it has"
        f" {', '.join(have)}: prepare it with --source NAME=PATH for each, or change the mix"
    )


def without_shares(manifest: Manifest) -> str:
    """Return what happens to the shares of a mix on a store of one source without a name."""
    return (
        f"the store {manifest.root} has one source without a name, so the stage takes its "
        "documents as they are, without the shares of the mix; `longhaul prepare --source "
        "NAME=PATH` names a source"
    )


def groups(mix: Mix, manifest: Manifest, seq_length: int) -> tuple[Group, ...]:
    """Return the groups of a mix for sequences of the stage's length and of its other lengths.

    Weights add up to 1 over the groups of one length, at the start and at the end of the stage.
    Raises MixError for a group with a weight and without documents.
    """
    buckets = {part.source: part.lengths for part in manifest.train.parts}
    shares = mix.shares or tuple(
        Share(source=part.source, weight=float(part.tokens)) for part in manifest.train.parts
    )
    unknown = sorted({share.source for share in shares} - set(buckets))
    if unknown:
        raise MixError(
            f"the store {manifest.root} has no source {', '.join(unknown)} to train on; it has "
            f"{', '.join(buckets)}"
        )
    split = [part for share in shares for part in _by_length(share, mix, buckets[share.source])]
    start = sum(share.weight for share in split)
    end = sum(share.final_weight for share in split)
    found = []
    for length, between in zip(mix.lengths(seq_length), _between(mix), strict=True):
        for share in split:
            if not share.weight and not share.final_weight:
                continue
            documents, tokens = _held(share, buckets[share.source])
            if not documents:
                raise MixError(_without_documents(share, buckets[share.source], manifest))
            few = documents * min(high - low for low, high in _between(mix)) < FEWEST
            found.append(
                Group(
                    source=share.source,
                    at_least=share.at_least,
                    below=share.below,
                    seq_length=length,
                    weight=share.weight / start,
                    end_weight=share.final_weight / end,
                    documents=documents,
                    tokens=tokens,
                    between=(0.0, 1.0) if few else between,
                )
            )
    return tuple(found)


def _between(mix: Mix) -> list[tuple[float, float]]:
    """Return the range of document hashes of each length of steps, the stage's own first."""
    others = [other.steps for other in mix.other_lengths]
    bounds = list(accumulate([1 - sum(others), *others], initial=0.0))
    bounds[-1] = 1.0
    return list(pairwise(bounds))


def needs(mix: Mix, found: tuple[Group, ...], tokens: int) -> list[Need]:
    """Return what a stage of a number of tokens takes of each group's documents.

    Raises MixError where a document would be seen more often than the mix allows. A mix without
    shares takes all documents equally often, as a stage without a mix does: that is never refused.
    """
    moving = (1 - mix.ramp_from) / 2  # of the way to the end weights, on average over the stage
    rows: dict[str, Need] = {}
    for group in found:
        if group.words in rows:
            continue  # steps of every length take the same documents
        share = group.weight + (group.end_weight - group.weight) * moving
        rows[group.words] = Need(group.words, share, round(share * tokens), group.tokens)
    need = max(rows.values(), key=lambda need: need.repeats)
    taken = (
        f"{need.words} has {need.held:,} tokens, and a share of {need.share:.1%} takes "
        f"{need.tokens:,}: "
    )
    if mix.most_repeats is not None and need.repeats > mix.most_repeats:
        missing = need.tokens - round(need.held * mix.most_repeats)
        raise MixError(
            f"{taken}{missing:,} are missing at most_repeats {mix.most_repeats:g}; lower its "
            "weight, add documents, or allow more repeats"
        )
    has_shares = bool(mix.shares) or mix.long_from is not None
    if mix.most_repeats is None and has_shares and need.repeats > USELESS_REPEATS:
        raise MixError(
            f"{taken}each would be seen {need.repeats:,.0f} times, and repeats beyond "
            f"{USELESS_REPEATS:g} teach nothing; lower its weight, add documents, or allow it with "
            f"most_repeats: {math.ceil(need.repeats)} in the mix"
        )
    return list(rows.values())


def often_repeated(rows: list[Need]) -> list[str]:
    """Return a sentence for each group that is seen more than four times in a stage."""
    return [
        f"{need.words} has {need.held:,} tokens and is seen {need.repeats:,.1f} times; beyond "
        f"{MANY_REPEATS:g} times repeated tokens teach less than new ones"
        for need in rows
        if need.repeats > MANY_REPEATS
    ]


def _by_length(share: Share, mix: Mix, buckets: tuple[LengthBucket, ...]) -> list[Share]:
    """Split a share into short and long documents where the mix states the share of long ones.

    The share of a source stays as it is: one whose documents are all long, or all short, gets it
    for these.
    """
    bound = mix.long_from
    if bound is None:
        return [share]
    if share.at_least >= bound or (share.below is not None and share.below <= bound):
        return [share]
    is_long = {bucket.at_least >= bound for bucket in _within(share, buckets)}
    if len(is_long) < 2:
        return [share]
    parts = ((1 - mix.long_share, share.at_least, bound), (mix.long_share, bound, share.below))
    return [
        Share(
            source=share.source,
            weight=share.weight * part,
            end_weight=share.final_weight * part,
            at_least=low,
            below=high,
        )
        for part, low, high in parts
    ]


def _held(share: Share, buckets: tuple[LengthBucket, ...]) -> tuple[int, int]:
    within = _within(share, buckets)
    return sum(bucket.documents for bucket in within), sum(bucket.tokens for bucket in within)


def _within(share: Share, buckets: tuple[LengthBucket, ...]) -> list[LengthBucket]:
    return [
        bucket
        for bucket in buckets
        if share.at_least <= bucket.at_least
        and (share.below is None or bucket.at_least < share.below)
    ]


def _without_documents(share: Share, buckets: tuple[LengthBucket, ...], manifest: Manifest) -> str:
    low, high = buckets[0].at_least, 2 * buckets[-1].at_least
    return (
        f"the store {manifest.root} has no training documents of {share.words} tokens; those of "
        f"{share.source} have {low:,} to {high - 1:,}: change at_least, below or long_from, or add "
        "documents"
    )
