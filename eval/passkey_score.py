# SPDX-License-Identifier: Apache-2.0
"""Score a passkey prompt by one forward pass, under any tensor and context parallel layout."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank

from custom_modules.gpt.model import LongContextGPT
from eval.passkey import Prompt


@torch.no_grad()
def score(model: LongContextGPT, prompt: Prompt) -> tuple[float, float, float]:
    """Return hit (0 or 1), summed nats and number of tokens of the answer.

    Each rank holds the logits of its positions for its part of the vocabulary: maximum and
    log-sum-exp are taken over tensor ranks, sums over context ranks. A token is a hit where no
    logit is above its own.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    tokens = torch.from_numpy(prompt.tokens[None]).to(device)
    length = tokens.shape[1]
    shard = get_batch_on_this_cp_rank(
        {
            "tokens": tokens,
            "next": tokens.roll(-1, dims=1),
            "positions": torch.arange(length, device=device)[None].contiguous(),
        }
    )
    logits = model(shard["tokens"], shard["positions"], None).float()  # [1, s, V / tp]
    asked = (shard["positions"] >= length - 1 - prompt.answer) & (shard["positions"] < length - 1)
    logits, targets = logits[asked], shard["next"][asked]

    tp = parallel_state.get_tensor_model_parallel_group()
    rows = logits.shape[1]
    own = targets - rows * parallel_state.get_tensor_model_parallel_rank()
    here = (own >= 0) & (own < rows)
    value = logits.gather(1, own.clamp(0, rows - 1)[:, None])[:, 0]
    value = value.masked_fill(~here, -torch.inf)
    best = logits.max(dim=1).values
    for reduced in (value, best):
        dist.all_reduce(reduced, dist.ReduceOp.MAX, group=tp)
    total = (logits - best[:, None]).exp().sum(1)
    dist.all_reduce(total, group=tp)

    nats = (best + total.log() - value).double().sum()
    sums = torch.stack((nats, (value < best).double().sum(), nats.new_tensor(len(targets))))
    dist.all_reduce(sums, group=parallel_state.get_context_parallel_group())
    summed_nats, wrong, count = sums.tolist()
    return float(wrong == 0), summed_nats, count
