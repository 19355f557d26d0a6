# SPDX-License-Identifier: Apache-2.0
"""Measurements in an evaluation's file; `eval.run_folder` has the rest of the file."""

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

from eval.position_bands import Bands
from recipes.spec.schema import Number

LEAST_TOKENS = 50
"""Tokens below which a part of the gain from context has no loss."""


@dataclass(frozen=True)
class ByPosition:
    """Mean loss of each bin of positions `edges[i]` to `edges[i + 1]`."""

    edges: tuple[int, ...]
    loss: tuple[Number, ...]
    tokens: tuple[int, ...]
    bands: Bands | None = None
    """Wider bins with their standard errors; None in files of earlier versions."""

    def __post_init__(self) -> None:
        """Raise ValueError for bins that do not fit their edges."""
        if not len(self.edges) - 1 == len(self.loss) == len(self.tokens):
            raise ValueError(
                f"{len(self.edges)} edges need {len(self.edges) - 1} bins, "
                f"found {len(self.loss)} of loss and {len(self.tokens)} of tokens"
            )
        if any(a >= b for a, b in itertools.pairwise(self.edges)):
            raise ValueError("edges must rise")


@dataclass(frozen=True)
class RangeMean:
    """Mean loss over positions `start` to `stop`.

    Args:
        standard_error: Of the mean, over documents; NaN for a single document.
        by_document: Mean loss of each document, in the order of the store.
    """

    start: int
    stop: int
    loss: Number
    tokens: int = 0
    standard_error: Number = math.nan
    by_document: tuple[Number, ...] = ()


@dataclass(frozen=True)
class Passkey:
    """The passkey grid: one row per prompt length, one column per depth.

    Args:
        hits: Share of the prompts whose greedy answer is exactly right.
        nats: Mean loss per answer token.
        chance_nats: Loss per answer token of a uniform guess of its digits.
        prompt_version: `eval.answers.passkey.PROMPT_VERSION` when the prompts were made; 1 in
            files that do not state it.
    """

    lengths: tuple[int, ...]
    depths: tuple[Number, ...]
    trials: int
    digits: int
    hits: tuple[tuple[Number, ...], ...]
    nats: tuple[tuple[Number, ...], ...]
    chance_nats: Number
    prompt_version: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for grids without prompts or of another shape than lengths by depths."""
        if not (self.lengths and self.depths and self.trials >= 1):
            raise ValueError(
                f"lengths, depths and trials are {len(self.lengths)}, {len(self.depths)} and "
                f"{self.trials}; expected at least one of each, or no passkey at all"
            )
        for name, grid in (("hits", self.hits), ("nats", self.nats)):
            if [len(row) for row in grid] != [len(self.depths)] * len(self.lengths):
                raise ValueError(
                    f"{name} must have {len(self.lengths)} rows of {len(self.depths)} numbers"
                )

    @property
    def tried(self) -> int:
        """Prompts of the whole grid."""
        return self.trials * len(self.lengths) * len(self.depths)

    @property
    def found(self) -> int:
        """Prompts of the whole grid that were answered exactly."""
        shares = (share for row in self.hits for share in row if math.isfinite(share))
        return sum(round(share * self.trials) for share in shares)


@dataclass(frozen=True)
class BaseRecord:
    """Weights that training started from, and how their positions were rotated.

    Args:
        stages: Stages that have this rotation, which they are compared with; empty for the weights'
            own, which every stage is compared with.
    """

    checkpoint: str
    rope: dict[str, Any]
    stages: tuple[str, ...] = ()

    def same_weights(self, other: "BaseRecord | None") -> bool:
        """Return whether another record is of the same weights under the same rotation."""
        return other is not None and (self.checkpoint, self.rope) == (other.checkpoint, other.rope)

    def with_stages_of(self, other: "BaseRecord | None") -> "BaseRecord":
        """Return the record with the stages of an earlier one of the same weights too."""
        if other is None or not self.stages or not self.same_weights(other):
            return self
        return replace(self, stages=tuple(dict.fromkeys((*other.stages, *self.stages))))


@dataclass(frozen=True)
class GainPart:
    """Mean loss of some of the scored tokens of `ContextGain`, for each of its contexts.

    Args:
        kind: "source", or "tokens" for a kind of token.
        name: The source; or "frequent", "rare" or "copied" (`eval.loss.gain_parts`).
        documents: Those that have such tokens.
        loss: Mean over tokens; empty if there are too few of them.
        standard_error: Of that mean, over documents; NaN for a single document.
        gain_error: That of `gain`.
    """

    kind: str
    name: str
    tokens: int
    documents: int
    loss: tuple[Number, ...] = ()
    standard_error: tuple[Number, ...] = ()
    gain_error: Number = math.nan

    @property
    def gain(self) -> float:
        """Loss given the fewest tokens, less that given the whole window; NaN if unmeasured."""
        return self.loss[0] - self.loss[-1] if self.loss else math.nan


@dataclass(frozen=True)
class ContextGain:
    """Mean loss of the last `scored` tokens of windows, by how many of the last tokens are read.

    Args:
        contexts: Tokens that are read, the scored ones among them; the last is the whole window.
        loss: Mean over documents, for each of `contexts`.
        standard_error: Of that mean; NaN for a single document.
        by_document: Mean loss of each document, a row, in the order of the store.
        parts: By source and kind of token; empty in files of earlier versions.
    """

    scored: int
    contexts: tuple[int, ...]
    loss: tuple[Number, ...]
    standard_error: tuple[Number, ...]
    by_document: tuple[tuple[Number, ...], ...] = field(repr=False)
    parts: tuple[GainPart, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError without contexts or documents, or for numbers that do not fit them."""
        if not self.contexts:
            raise ValueError("contexts is empty; expected the numbers of tokens that were read")
        if any(a >= b for a, b in itertools.pairwise(self.contexts)):
            raise ValueError("contexts must rise")
        of_parts = [
            row for part in self.parts if part.loss for row in (part.loss, part.standard_error)
        ]
        for row in (self.loss, self.standard_error, *self.by_document, *of_parts):
            if len(row) != len(self.contexts):
                raise ValueError(f"{len(self.contexts)} contexts have {len(row)} numbers")
        if not self.by_document:
            raise ValueError("by_document is empty; expected a row for each document")


@dataclass(frozen=True)
class ShortLoss:
    """Loss of documents that fit whole within `length` tokens, each read alone.

    Args:
        loss: Mean over documents of their mean losses.
        standard_error: Of `loss`, over documents; NaN for a single document.
        token_loss: Mean over all tokens, so that longer documents count more.
        by_document: Mean loss of each document, in the order of the store.
        tokens: Predicted tokens of each document.
    """

    length: int
    loss: Number
    standard_error: Number
    token_loss: Number
    by_document: tuple[Number, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise ValueError unless each document has a loss and its tokens."""
        if not self.by_document or len(self.by_document) != len(self.tokens):
            raise ValueError(
                f"by_document has {len(self.by_document)} numbers and tokens {len(self.tokens)}; "
                "expected one of each document in both"
            )
