# SPDX-License-Identifier: Apache-2.0
"""The gain from context of some of the scored tokens: those of a source, or of a kind of token.

    frequent   the commonest tokens, which together are half of the training split
    rare       the rarest tokens, which together are at most a tenth of it
    copied     the last of three tokens that follow each other before the shortest context too, and
               nowhere else within it: only a longer context can tell them (arXiv 2109.09115)

            |------- before -------|------- shortest context -------|
                ... a b c ...          ... no a b c ...      a b c       c is copied

A part has another number of tokens n_d, of summed loss x_d, in each of D documents. Its loss is the
ratio of sums R = sum x_d / sum n_d, whose standard error is linearised:

    sqrt( D / (D - 1) * sum (x_d - R n_d)^2 ) / sum n_d

which is that of the mean of documents where all n_d are equal.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eval.measurements import LEAST_TOKENS, GainPart

FREQUENT_SHARE = 0.5
RARE_SHARE = 0.1
GRAM = 3
"""Tokens that follow each other, the last of which is copied."""


def frequent_and_rare(counts: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which token ids are frequent and which are rare, by their occurrences [V]."""
    total = counts.sum()
    frequent, rare = np.zeros((2, len(counts)), dtype=np.bool_)
    if total:
        order = np.argsort(-counts, kind="stable")
        sorted_counts = counts[order]
        up_to = np.cumsum(sorted_counts)
        frequent[order] = up_to - sorted_counts < FREQUENT_SHARE * total
        rare[order] = total - (up_to - sorted_counts) <= RARE_SHARE * total
    return frequent, rare


def copied(window: NDArray[np.int64], scored: int, shortest: int) -> NDArray[np.bool_]:
    """Return which of the last `scored` tokens of a window are copied from before `shortest`.

    `shortest` is how many of the last tokens the shortest context reads.
    """
    start, vocabulary = len(window) - shortest, int(window.max()) + 1  # 3 ids fit below 2**63
    if start <= 0 or shortest < scored + GRAM - 1:
        return np.zeros(scored, dtype=np.bool_)
    grams = (window[:-2] * vocabulary + window[1:-1]) * vocabulary + window[2:]
    inside = grams[start:]
    _, first, kinds = np.unique(inside, return_index=True, return_inverse=True)
    is_first = first[kinds] == np.arange(len(inside))
    return (np.isin(inside, grams[:start]) & is_first)[-scored:]


def gain_parts(
    losses: NDArray[np.float64],
    windows: Sequence[NDArray[np.int64]],
    shortest: int,
    sources: Sequence[str] = (),
    counts: NDArray[np.int64] | None = None,
) -> tuple[GainPart, ...]:
    """Return the parts of losses [documents, contexts, scored] of windows of documents.

    The sources of the documents, if given, are parts; with the counts of token ids [V] there are
    frequent and rare tokens.
    """
    scored = losses.shape[2]
    targets = np.stack([window[-scored:] for window in windows])
    parts = [
        part_of(
            "source", name, losses, np.outer([each == name for each in sources], [True] * scored)
        )
        for name in dict.fromkeys(sources)
    ]
    if counts is not None:
        frequent, rare = frequent_and_rare(counts)
        parts.append(part_of("tokens", "frequent", losses, frequent[targets]))
        parts.append(part_of("tokens", "rare", losses, rare[targets]))
    from_before = np.stack([copied(window, scored, shortest) for window in windows])
    return (*parts, part_of("tokens", "copied", losses, from_before))


def part_of(kind: str, name: str, losses: NDArray[np.float64], mask: NDArray[np.bool_]) -> GainPart:
    """Return the part of losses [documents, contexts, scored] in a mask [documents, scored]."""
    counts = mask.sum(1)
    tokens, documents = int(counts.sum()), int((counts > 0).sum())
    if tokens < LEAST_TOKENS:
        return GainPart(kind, name, tokens, documents)
    sums = np.einsum("dcs,ds->cd", losses, mask.astype(np.float64))
    return GainPart(
        kind,
        name,
        tokens,
        documents,
        loss=tuple((sums.sum(1) / tokens).tolist()),
        standard_error=tuple(ratio_error(row, counts) for row in sums),
        gain_error=ratio_error(sums[0] - sums[-1], counts),
    )


def ratio_error(sums: NDArray[np.float64], counts: NDArray[np.int64]) -> float:
    """Return the standard error of a ratio of sums over documents; NaN for a single document."""
    documents = int((counts > 0).sum())
    if documents < 2:
        return math.nan
    residuals = sums - sums.sum() / counts.sum() * counts
    return math.sqrt(documents / (documents - 1) * float((residuals**2).sum())) / int(counts.sum())
