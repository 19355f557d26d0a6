# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and likeliest next tokens of a sequence, under tensor and context parallelism.

One forward pass over the whole sequence. Each context rank has the hidden states of its positions,
each tensor rank the logits of its part of the vocabulary. Only the asked rows go through the output
head: the logits of 128K tokens and 128K words would be 64 GiB.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from custom_modules.gpt.model import LongContextGPT
from eval.passkey import logits_only_of


@torch.no_grad()
def next_tokens(model: LongContextGPT, tokens: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
    """Return what the model says after each of `tokens[start:]`, equal on all ranks of a model.

    The first tensor has the log-probability of the token that follows in the sequence (0 after the
    last token), the second the likeliest next token; of several equal ones the first.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    length = len(tokens)
    padding = -length % multiple()
    sequence = torch.tensor([[*tokens, *[0] * padding]], device=device)
    shard = get_batch_on_this_cp_rank(
        {
            "tokens": sequence,
            "next": sequence.roll(-1, dims=1),
            "positions": torch.arange(length + padding, device=device)[None].contiguous(),
        }
    )
    asked = (shard["positions"] >= start) & (shard["positions"] < length)
    with logits_only_of(model, asked[0]):
        logits = model(shard["tokens"], shard["positions"], None)[0].float()  # [asked, V / tp]
    log_probabilities, likeliest = _over_vocabulary(logits, shard["next"][asked])

    rows = shard["positions"][asked] - start
    found = torch.zeros(length - start, dtype=torch.float64, device=device)
    best = torch.zeros(length - start, dtype=torch.int64, device=device)
    found[rows], best[rows] = log_probabilities.double(), likeliest
    for summed in (found, best):
        dist.all_reduce(summed, group=parallel_state.get_context_parallel_group())
    found[-1] = 0
    return found.cpu(), best.cpu()


def multiple() -> int:
    """Return the number of tokens of which a sequence must be a multiple.

    Context parallelism cuts it into two pieces for each rank, sequence parallelism each rank's part
    into one for each tensor rank. The padding comes last, so that no token attends to it.
    """
    cp = parallel_state.get_context_parallel_world_size()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    return (2 * cp if cp > 1 else 1) * tp


def _over_vocabulary(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of targets [n], and likeliest tokens, of logits [n, V / tp]."""
    tp = parallel_state.get_tensor_model_parallel_group()
    rows = logits.shape[1]
    first = rows * parallel_state.get_tensor_model_parallel_rank()
    own = targets - first
    here = (own >= 0) & (own < rows)
    value = logits.gather(1, own.clamp(0, rows - 1)[:, None])[:, 0]
    value = value.masked_fill(~here, -torch.inf)
    highest, at = logits.max(dim=1)
    best = highest.clone()
    for reduced in (value, best):
        dist.all_reduce(reduced, dist.ReduceOp.MAX, group=tp)
    total = (logits - best[:, None]).exp().sum(1)
    dist.all_reduce(total, group=tp)
    likeliest = (at + first).masked_fill(highest < best, torch.iinfo(torch.int64).max)
    dist.all_reduce(likeliest, dist.ReduceOp.MIN, group=tp)
    return value - best - total.log(), likeliest
