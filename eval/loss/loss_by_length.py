# SPDX-License-Identifier: Apache-2.0
"""Loss of whole documents by their length: each power of two of tokens has a mean of its own.

The loss by position reads windows of long documents only. A model that learns to use a longer
context can at the same time become worse at short documents, and at lengths in between. Here every
document is read alone, from its beginning to its end, as in `eval.loss.short_loss`; a length stands
for the documents of that many tokens to less than twice as many.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray

from custom_modules.gpt.model import LongContextGPT
from data.store import Manifest
from data.token_files.held_out import documents_in_turn
from eval.answers.generation import padded_length
from eval.loss.loss_by_position import token_losses
from eval.loss.short_loss import FEWEST_TOKENS

MOST_DOCUMENTS = 8
"""Documents of a length."""
MOST_OF_A_WINDOW = 0.5
"""Tokens of the documents of a length, in windows; one document may have more."""

Documents = Mapping[int, Sequence[NDArray[np.int64]]]
"""Documents by the power of two that is their length or less."""


def documents_by_length(manifest: Manifest, window: int) -> Documents:
    """Return the first held-out documents of each length that a window reads whole; maybe none.

    Sources take turns. A length that no document has is left out.
    """
    found = {}
    for length in _lengths(manifest, window):
        longest = min(2 * length - 1, window + 1)
        number = max(1, min(MOST_DOCUMENTS, int(MOST_OF_A_WINDOW * window) // longest))
        texts = documents_in_turn(manifest, min_tokens=length, max_tokens=longest)
        if documents := [text for _, text in islice(texts, number)]:
            found[length] = documents
    return found


def windows_read(documents: Documents, window: int, ranks: int) -> float:
    """Return the tokens that each of `ranks` data ranks reads, in windows."""
    tokens = sum(math.ceil(len(some) / ranks) * max(map(len, some)) for some in documents.values())
    return tokens / window


def loss_by_length(model: LongContextGPT, documents: Documents) -> dict[int, float]:
    """Return the mean loss of the tokens of each length, over all ranks."""
    return {length: _mean_loss(model, some) for length, some in documents.items()}


@torch.no_grad()
def _mean_loss(model: LongContextGPT, documents: Sequence[NDArray[np.int64]]) -> float:
    """Return the mean loss of the tokens of documents, by one forward on every data rank.

    Every rank reads equally many, padded on the right to the longest: a rank that has fewer reads
    another one again, which is not counted.
    """
    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    rows = math.ceil(len(documents) / size)
    padded = np.zeros((rows, padded_length(max(map(len, documents)) - 1) + 1), dtype=np.int64)
    counted = torch.zeros(rows, 1, dtype=torch.int64)
    for row in range(rows):
        index = row * size + rank
        document = documents[index % len(documents)]
        padded[row, : len(document)] = document
        if index < len(documents):
            counted[row] = len(document) - 1
    losses, positions = token_losses(model, torch.from_numpy(padded).to(device))
    inside = positions < counted.to(device)
    sums = torch.stack([losses.double()[inside].sum(), inside.sum().double()])
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return float(sums[0] / sums[1])


def _lengths(manifest: Manifest, window: int) -> list[int]:
    """Return the lengths of the held-out documents that a window reads whole, ascending."""
    held = {bucket.at_least for part in manifest.heldout.parts for bucket in part.lengths}
    return sorted(length for length in held if FEWEST_TOKENS <= length <= window)
