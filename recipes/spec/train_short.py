# SPDX-License-Identifier: Apache-2.0
"""Which positions a stage trains on: a way to train short and test long, as a choice of a Stage.

| kind | what is other than in plain training | source |
| --- | --- | --- |
| consecutive | nothing | |
| pose | positions in a few chunks, with skips between them | 2309.10400 |
| longrecipe | text of chosen sentences, positions with skips between sentences | 2409.00509 |
| gene | a rotation scaled by chance, positions as they are | 2024.findings-acl.249 |

Light: `custom_modules.rope.skipped_positions` draws them, `data.nemo_module` calls it for training
samples alone.
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
    """One kind with its parameters; raises ValueError for values outside of its domain."""

    kind: PositionKind = "consecutive"
    # Optional[...] here: nemo-run 0.11.1 cannot parse an override of a field annotated `X | None`.
    target_length: Optional[int] = None  # noqa: UP045
    """Tokens of the context that the stage trains for, at which it is evaluated."""
    chunks: int = 2
    """Of PoSE; the paper's choice, one more covers more distances and departs further."""
    sentences: Sentences = "all"
    """Of LongRecipe: which sentences of a text of `target_length` make a sample. `all` takes a
    text of the stage's length as it is; `digits` those with a digit, as the released code;
    `impactful` those with a token that the analysis found (`eval.impactful_tokens`)."""
    keep_others: float = 0.0
    """Of LongRecipe: the chance of any other sentence to stay; the released code has 0.5."""

    def __post_init__(self) -> None:
        """Refuse values outside the kind's domain, and those without effect on it."""
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
            raise ValueError(f"chunks is {self.chunks}; positions skip between two or more")
        if self.sentences not in get_args(Sentences):
            raise ValueError(
                f"sentences is {self.sentences!r}; it is one of {', '.join(get_args(Sentences))}"
            )
        if not 0 <= self.keep_others < 1:
            raise ValueError(f"keep_others is {self.keep_others}; it is a chance, 0 to below 1")
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
