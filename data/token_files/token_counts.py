# SPDX-License-Identifier: Apache-2.0
"""How often each token occurs in a store, which says what is frequent and what is rare."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from data.store import Manifest, SplitName

MOST_COUNTED = 2**22
"""Tokens that are counted of a larger split; it changes little what is frequent and rare."""
LONGEST_PIECE = 2**16
"""Tokens that are counted of a longer document, its first ones, if not all are counted."""
AT_ONCE = 2**20
"""Tokens that are held in memory, besides one piece."""


def token_counts(
    manifest: Manifest, split: SplitName = "train", most: int = MOST_COUNTED
) -> NDArray[np.int64]:
    """Return the occurrences of each token id in a split, or in an even sample of its documents.

    About `most` tokens are counted, of each source its share of them.
    """
    counts = np.zeros(manifest.tokenizer.vocab_size, dtype=np.int64)
    waiting: list[NDArray[np.int64]] = []
    held = 0
    for piece in _pieces(manifest, split, most):
        waiting.append(piece)
        held += len(piece)
        if held >= AT_ONCE:
            counts += np.bincount(np.concatenate(waiting), minlength=len(counts))
            waiting, held = [], 0
    if waiting:
        counts += np.bincount(np.concatenate(waiting), minlength=len(counts))
    return counts


def _pieces(manifest: Manifest, split: SplitName, most: int) -> Iterator[NDArray[np.int64]]:
    from data.token_files.stored_documents import StoredDocuments, require_whole  # imports torch

    facts = manifest.split(split)
    longest = LONGEST_PIECE if facts.tokens > most else facts.longest
    for part, prefix in zip(facts.parts, manifest.prefixes(split), strict=True):
        require_whole(prefix)
        documents = StoredDocuments(str(prefix))
        of_each = min(part.tokens / max(part.documents, 1), longest)
        share = most * part.tokens / facts.tokens
        step = max(1, math.ceil(part.documents * of_each / max(share, 1)))
        for number in range(0, len(documents), step):
            tokens = min(int(documents.sequence_lengths[number]), longest)
            yield documents.get(number, length=tokens).astype(np.int64)
