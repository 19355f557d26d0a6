# SPDX-License-Identifier: Apache-2.0
"""Loss of the same tokens, given more and more of the text before them: the gain from context.

    window   |----------------------- L tokens -----------------------|
    scored                                                      |--T--|
    read                                            |------ n --------|      n = 2T, 4T, ... L

The loss by position compares different tokens, so it also falls or rises with the text. Here the
last T tokens of each window are scored, each time given only the last n tokens, whose positions
begin at 0. A model that uses a longer context predicts these tokens better. The last n tokens
include the scored ones, so that each scored token has n - T to n - 1 tokens before it.

All n together read about 2 L tokens of a window. Logits are formed for the scored tokens only. The
loss of each of them is kept, so that a source, or a kind of token, has its own
(`eval.loss.gain_parts`).
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from numpy.typing import NDArray

from custom_modules.gpt.model import LongContextGPT
from data.token_files.held_out import with_first
from eval import pipeline
from eval.loss.gain_parts import gain_parts
from eval.loss.loss_by_position import windows
from eval.measurements import ContextGain, GainPart
from eval.rope_search.scored_loss import scored_token_losses
from eval.rope_search.scored_text import ScoredText
from eval.uncertainty import standard_error

MOST_SCORED = 1024


def scored_tokens(length: int) -> int:
    """Return T for windows of `length` tokens: a power of two, at most a quarter of them."""
    return min(MOST_SCORED, 2 ** max(0, (length // 4).bit_length() - 1))


def contexts(length: int, ranks: int = 1) -> list[int]:
    """Return each n for windows of `length` tokens, the last of which is `length`.

    A context whose tokens cannot be shared by `ranks` (twice the context ranks, times the tensor
    ranks) is left out.
    """
    context, found = 2 * scored_tokens(length), []
    while context < length:
        found += [context] if context % ranks == 0 else []
        context *= 2
    return [*found, length]


def context_gain(
    model: LongContextGPT,
    documents: Iterable[NDArray[np.int64]],
    length: int,
    sources: Sequence[str] = (),
    counts: NDArray[np.int64] | None = None,
    first: int = 0,
) -> ContextGain:
    """Return the loss of the last tokens of each document's window, by the tokens that are read.

    The windows are those of `loss_by_position`; they are distributed over data ranks. The sources
    of the documents and the counts of token ids are for `gain_parts`.
    """
    shared_by = 2 * parallel_state.get_context_parallel_world_size()
    shared_by *= parallel_state.get_tensor_model_parallel_world_size()
    scored, lengths = scored_tokens(length), contexts(length, shared_by)
    read = list(windows(documents, length, first))
    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    losses = torch.zeros(len(read), len(lengths), scored, dtype=torch.float64, device=device)
    for index in range(rank, len(read), size):
        for column, context in enumerate(lengths):
            tokens = with_first(read[index], length + 1 - context, context, first)
            text = ScoredText(tokens, np.arange(context) >= context - scored)
            of_shard, places = scored_token_losses(model, text)
            losses[index, column, places - (context - scored)] = of_shard
    pipeline.summed(losses)
    whole = [window[-length:] for window in read]
    parts = gain_parts(losses.cpu().numpy(), whole, lengths[0], sources, counts)
    return gain_of(scored, lengths, losses.mean(2).tolist(), parts)


def gain_of(
    scored: int,
    lengths: list[int],
    by_document: list[list[float]],
    parts: tuple[GainPart, ...] = (),
) -> ContextGain:
    """Return the curve of documents' mean losses, a row for each."""
    columns = list(zip(*by_document, strict=True))
    return ContextGain(
        scored=scored,
        contexts=tuple(lengths),
        loss=tuple(sum(column) / len(column) for column in columns),
        standard_error=tuple(standard_error(column) for column in columns),
        by_document=tuple(tuple(row) for row in by_document),
        parts=parts,
    )
