# SPDX-License-Identifier: Apache-2.0
"""The token types that a longer context matters to most; LongRecipe (arXiv 2409.00509, eq. 3).

    score(t) = sum over the places i of t of  log p_after(t | text before i) - log p_before(...)

`before` and `after` are one model before and after a short extension of its context. The paper
subtracts logits, which equal log-probabilities up to a constant at each place; log-probabilities
are free of it. The types with the highest scores, a share of those that occur, are the impactful
ones. The paper derives parts of speech from them (numerals lead) and its released code keeps only
sentences with digits; here the types themselves are used, as in its equation.

The result is a file of the store, `impactful_tokens.json`, which also names its inputs.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.files.whole import write_text
from data.store import Manifest, SplitName, StoreError

FILE = "impactful_tokens.json"


def add_changes(sums: Tensor, counts: Tensor, tokens: Tensor, change: Tensor) -> None:
    """Add log-probability changes [N] of the tokens [N] to their types' `sums` and `counts` [V]."""
    sums.index_add_(0, tokens, change.to(sums.dtype))
    counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=counts.dtype))


def highest(sums: Tensor, counts: Tensor, share: float) -> list[int]:
    """Return the token types with the highest sums [V], a share of those counted, at least one.

    Raises ValueError for an invalid share, and if nothing was counted.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}; expected more than 0 and at most 1")
    seen = counts.nonzero().flatten()
    if not len(seen):
        raise ValueError("no token was scored; give documents of the requested length")
    ranked = seen[sums[seen].argsort(descending=True, stable=True)]
    return [int(token) for token in ranked[: max(1, round(share * len(seen)))]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImpactfulTokens:
    """The impactful types of a store, highest score first, and how they were found."""

    tokens: tuple[int, ...]
    share: float
    """Share of the types that occur."""
    split: SplitName
    sha256: str
    """Hash of the split's tokens."""
    before: str
    after: str
    """Checkpoints: stage and step."""
    places: int
    """Tokens that were scored."""

    def write(self, store: Path) -> None:
        """Write the file of the store atomically."""
        write_text(store / FILE, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, manifest: Manifest) -> "ImpactfulTokens":
        """Read a store's file; raises StoreError if missing, damaged or from another store."""
        path = manifest.root / FILE
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            found = cls(**{**content, "tokens": tuple(int(token) for token in content["tokens"])})
            split = manifest.split(found.split)
        except FileNotFoundError:
            raise StoreError(
                f"{manifest.root} has no {FILE}; `python -m eval.loss.impactful_tokens` makes it, "
                "or choose sentences 'digits'"
            ) from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StoreError(f"{path} cannot be read ({error})") from error
        if split.sha256 != found.sha256:
            raise StoreError(
                f"{path} was made from other tokens than the store's {found.split} split; make it "
                "again"
            )
        return found
