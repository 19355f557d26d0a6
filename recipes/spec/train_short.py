# SPDX-License-Identifier: Apache-2.0
"""Positions that a stage trains on: ways to train on short sequences for a longer context.

| kind | difference from plain training | source |
| --- | --- | --- |
| consecutive | nothing | |
| pose | positions in a few chunks, with skips between them | 2309.10400 |
| longrecipe | text of chosen sentences, positions with skips between sentences | 2409.00509 |
| gene | a rotation scaled at random, consecutive positions | 2024.findings-acl.249 |

`custom_modules.rope.skipped_positions` draws them; `data.nemo_module` calls it for training samples
only.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, Optional, get_args

from custom_modules.rope.config import MAX_POSITION

PositionKind = Literal["consecutive", "pose", "longrecipe", "gene"]
Sentences = Literal["all", "digits", "impactful"]

_USES: dict[str, tuple[str, ...]] = {
    "consecutive": (),
    "pose": ("target_length", "chunks"),
    "longrecipe": ("target_length", "sentences", "keep_others"),
    "gene": ("target_length",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Positions:
    """One kind with its parameters; raises ValueError for values out of range."""

    kind: PositionKind = "consecutive"
    # Optional[...] here: nemo-run 0.11.1 cannot parse an override of a field annotated `X | None`.
    target_length: Optional[int] = None  # noqa: UP045
    """Context length in tokens that the stage trains for and is evaluated at."""
    chunks: int = 2
    """PoSE only. The default is the paper's; more chunks cover more distances and differ more from
    plain training."""
    sentences: Sentences = "all"
    """LongRecipe only: which sentences of a text of `target_length` make a sample. `all` takes a
    text of the stage's length unchanged; `digits` those with a digit, as in the released code;
    `impactful` those with a token that the analysis found (`eval.loss.impactful_tokens`)."""
    keep_others: float = 0.0
    """LongRecipe only: probability of keeping any other sentence; 0.5 in the released code."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range or without effect on the kind."""
        if self.kind not in get_args(PositionKind):
            *most, last = get_args(PositionKind)
            raise ValueError(
                f"positions {self.kind!r} are unknown; choose {', '.join(most)} or {last}"
            )
        unused = [name for name in self._stated() if name not in ("kind", *_USES[self.kind])]
        if unused:
            raise ValueError(
                f"{', '.join(unused)} has no effect on positions {self.kind}; leave it out, or "
                "choose the kind that uses it"
            )
        if self.kind != "consecutive":
            self._require_target()
        if self.chunks < 2:
            raise ValueError(f"chunks is {self.chunks}; it must be at least 2")
        if self.sentences not in get_args(Sentences):
            raise ValueError(
                f"sentences is {self.sentences!r}; choose {', '.join(get_args(Sentences))}"
            )
        if not 0 <= self.keep_others < 1:
            raise ValueError(
                f"keep_others is {self.keep_others}; it is a probability, 0 to below 1"
            )
        if self.keep_others and self.sentences == "all":
            raise ValueError(
                "keep_others has no effect on sentences 'all'; leave it out, or choose 'digits' or "
                "'impactful'"
            )

    def _require_target(self) -> None:
        if self.target_length is None or not 1 <= self.target_length <= MAX_POSITION:
            raise ValueError(
                f"positions {self.kind} need target_length, the context in tokens to train for, up "
                f"to 2^31; got {self.target_length}"
            )

    def _stated(self) -> dict[str, Any]:
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    @classmethod
    def pose(cls, target_length: int, *, chunks: int = 2) -> "Positions":
        """Chunks with skips between them (PoSE, arXiv 2309.10400)."""
        return cls(kind="pose", target_length=target_length, chunks=chunks)

    @classmethod
    def longrecipe(
        cls, target_length: int, *, sentences: Sentences = "impactful", keep_others: float = 0.0
    ) -> "Positions":
        """Chosen sentences with skips between them (LongRecipe, arXiv 2409.00509)."""
        return cls(
            kind="longrecipe",
            target_length=target_length,
            sentences=sentences,
            keep_others=keep_others,
        )

    @classmethod
    def gene(cls, target_length: int) -> "Positions":
        """A rotation scaled at random; a stage's is `custom_modules.rope.gene.gene_rotation`."""
        return cls(kind="gene", target_length=target_length)
