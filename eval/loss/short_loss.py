# SPDX-License-Identifier: Apache-2.0
"""Loss of short documents, each read whole and alone: what a longer context costs at short length.

`eval.loss.loss_by_position` reads windows of long documents only, which does not show whether a
model still reads short documents as well as before. Here each document is read from its beginning
to its end with nothing before it. Padding on the right, for context and tensor ranks, is not
counted.
"""

from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
from megatron.core import parallel_state
from numpy.typing import NDArray

from custom_modules.gpt.model import LongContextGPT
from data.store import Manifest
from data.token_files.held_out import long_documents
from eval import pipeline
from eval.answers.generation import padded_length
from eval.loss.loss_by_position import token_losses
from eval.measurements import ShortLoss
from eval.uncertainty import standard_error

FEWEST_TOKENS = 64
"""Shorter documents say little about a model."""

MOST_DOCUMENTS = 48


def short_documents(manifest: Manifest, length: int) -> list[NDArray[np.int64]]:
    """Return the first held-out documents that a context of `length` reads whole; maybe none."""
    found = long_documents(manifest, min_tokens=FEWEST_TOKENS, max_tokens=length + 1)
    return list(islice(found, MOST_DOCUMENTS))


@torch.no_grad()
def short_loss(
    model: LongContextGPT, documents: Sequence[NDArray[np.int64]], length: int
) -> ShortLoss | None:
    """Return the loss of whole documents, which are distributed over data ranks; None for none."""
    if not documents:
        return None
    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    sums = torch.zeros(len(documents), dtype=torch.float64, device=device)
    for index in range(rank, len(documents), size):
        document = documents[index]
        counted = len(document) - 1
        padded = np.zeros((1, padded_length(counted) + 1), dtype=np.int64)
        padded[0, : len(document)] = document
        losses, positions = token_losses(model, torch.from_numpy(padded).to(device))
        sums[index] = losses.double()[positions < counted].sum()
    pipeline.summed(sums)
    tokens = [len(document) - 1 for document in documents]
    means = [total / count for total, count in zip(sums.tolist(), tokens, strict=True)]
    return ShortLoss(
        length=length,
        loss=sum(means) / len(means),
        standard_error=standard_error(means),
        token_loss=float(sums.sum()) / sum(tokens),
        by_document=tuple(means),
        tokens=tuple(tokens),
    )
