# SPDX-License-Identifier: Apache-2.0
"""Mean loss of the scored tokens of texts under a rotation, for any layout.

    score = sum of losses at scored tokens / their number        (its exp is the perplexity)

The rotation is replaced for the call and weights are not moved, so a candidate of a search costs
one forward pass per text. Logits are formed only for scored tokens, one tile at a time.
"""

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from custom_modules.gpt.model import LongContextGPT
from custom_modules.memory.config import LOSS_TILE
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import Rotation
from eval import pipeline
from eval.rope_search.scored_text import ScoredText


def scored_losses(model: LongContextGPT, text: ScoredText) -> Tensor:
    """Return the summed loss and the number of scored tokens on this rank's shard, float64 [2]."""
    losses, _ = scored_token_losses(model, text)
    return torch.stack((losses.sum(), losses.new_tensor(len(losses))))


@torch.no_grad()
def scored_token_losses(model: LongContextGPT, text: ScoredText) -> tuple[Tensor, Tensor]:
    """Return the loss, float64, and the place in the text of each scored token of this shard.

    Losses are zeros before the last pipeline stage.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    tokens = torch.from_numpy(text.tokens[None]).to(device)
    asked = torch.from_numpy(text.scored[None]).to(device).roll(-1, dims=1)
    asked[:, -1] = False  # its next token would be the first
    shard = get_batch_on_this_cp_rank(
        {
            "tokens": tokens,
            "labels": tokens.roll(-1, dims=1),
            "positions": torch.arange(tokens.shape[1], device=device)[None].contiguous(),
            "asked": asked,
        }
    )
    losses = pipeline.losses(
        model,
        shard["tokens"],
        shard["positions"],
        shard["labels"],
        loss_mask=shard["asked"].float(),
    )
    return losses[shard["asked"]].double(), shard["positions"][shard["asked"]] + 1


def mean_loss(model: LongContextGPT, texts: Sequence[ScoredText], rope: RopeScaling) -> float:
    """Return nats per scored token of the model with rotation `rope`, the same on every rank.

    Texts are distributed over data ranks.
    """
    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    own, own_tile = model.rotation, model.loss_tile
    try:
        model.rotation, model.loss_tile = Rotation(rope, own.head_dim), own_tile or LOSS_TILE
        for text in texts[rank::size]:
            sums += scored_losses(model, text)
    finally:
        model.rotation, model.loss_tile = own, own_tile
    pipeline.summed(sums)
    return float(sums[0] / sums[1])
