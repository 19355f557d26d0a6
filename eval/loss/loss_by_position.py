# SPDX-License-Identifier: Apache-2.0
"""Mean loss at each position of windows of long documents: the basic test of a usable context.

A model that uses its context predicts better the more it has read, so its loss falls (or stays
equal) with position. Beyond the usable context the loss rises.

Each document contributes one window of `length` predictions, so every position averages over the
same documents. The window begins at a random token, drawn from a seed: the opening of a document
(licence, imports) differs from its middle, which would look like an effect of position. A position
is therefore one in the window, and says how much the model has read, not where in the document it
is. What documents of the store begin with (`Manifest.first_tokens`) begins a window too: a model
that was trained with a first token needs it. Sums of losses and counts of each document are added
up over data ranks and context ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from numpy.typing import NDArray
from torch import Tensor

from custom_modules.gpt.model import LongContextGPT
from data.token_files.held_out import with_first
from eval import pipeline
from eval.position_bands import Bands, band_edges, bands_of
from eval.run_folder import BUCKET

WINDOW_SEED = 0


@torch.no_grad()
def token_losses(model: LongContextGPT, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses and their positions, each [b, s], of this rank's shard of tokens [b, S + 1].

    Losses are zeros before the last pipeline stage.
    """
    length = tokens.shape[1] - 1
    positions = torch.arange(length, device=tokens.device).expand(tokens.shape[0], -1)
    shard = get_batch_on_this_cp_rank(
        {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "position_ids": positions.contiguous(),
        }
    )
    losses = pipeline.losses(model, shard["tokens"], shard["position_ids"], shard["labels"])
    return losses.float(), shard["position_ids"]


def windows(
    documents: Iterable[NDArray[np.int64]], length: int, first: int = 0
) -> Iterator[NDArray[np.int64]]:
    """Yield `length + 1` tokens of each document, from a random one on, its `first` ones before."""
    starts = np.random.default_rng(WINDOW_SEED)
    for document in documents:
        start = starts.integers(0, len(document) - length)
        yield with_first(document, start, length + 1, first)


def loss_by_position(
    model: LongContextGPT, documents: Iterable[NDArray[np.int64]], length: int, first: int = 0
) -> NDArray[np.float64]:
    """Return the mean loss of each document, a row, in each bucket of `BUCKET` positions.

    Documents have at least `length + 1` tokens, of which `first` are not of the text; they are
    distributed over data ranks.
    """
    read = list(windows(documents, length, first))
    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    sums = torch.zeros(len(read), 2, length // BUCKET, dtype=torch.float64, device=device)
    for index, window in enumerate(read):
        if index % size != rank:
            continue
        tokens = torch.from_numpy(window[None]).to(device)
        losses, positions = token_losses(model, tokens)
        buckets = positions.flatten() // BUCKET
        sums[index, 0].index_add_(0, buckets, losses.flatten().double())
        sums[index, 1].index_add_(0, buckets, torch.ones_like(losses).flatten().double())
    pipeline.summed(sums)
    means: NDArray[np.float64] = (sums[:, 0] / sums[:, 1]).cpu().numpy()
    return means


def position_bands(losses: NDArray[np.float64], lengths: Iterable[int]) -> Bands:
    """Return the means of documents in bands, from rows of buckets as `loss_by_position` has them.

    The quarters of each of `lengths` are edges of bands.
    """
    edges = band_edges(losses.shape[1] * BUCKET, BUCKET, lengths)
    rows = losses.tolist()
    return bands_of(edges, [[mean_over(row, a, b) for a, b in pairwise(edges)] for row in rows])


def mean_over(losses: Sequence[float], start: int, stop: int) -> float:
    """Return the mean over positions `start` to `stop`, whole buckets of equal size."""
    if start % BUCKET or stop % BUCKET or stop <= start:
        raise ValueError(f"positions {start} to {stop} are not whole buckets of {BUCKET}")
    inside = losses[start // BUCKET : stop // BUCKET]
    return sum(inside) / len(inside)
