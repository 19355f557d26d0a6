# SPDX-License-Identifier: Apache-2.0
"""Greedy answers of a checkpoint's model: generated, or told from one forward.

    tokens_0 = prompt,  tokens_{i+1} = tokens_i + argmax(logits of the last position)

Generation recomputes the whole sequence for every new token: it needs no cache, works under any
context and tensor parallelism, and costs as many forwards as tokens. Where only one text counts as
the answer, `would_generate` tells from a single forward over prompt and answer whether greedy
decoding gives it: it does if and only if each token is the argmax given those before.

Every rank calls these functions with the same ids and gets the same result. The vocabulary is
sharded over tensor ranks, so the maximum is taken over them (of equal logits the lowest id wins);
a position is on one context rank, which tells the others. Sequences are padded on the right to what
the ranks divide; attention is causal, so the padding changes nothing before it.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from custom_modules.gpt.model import LongContextGPT
from eval.passkey import logits_only_of

Generate = Callable[[Sequence[int], int], list[int]]
"""Returns the ids that follow a prompt's, at most as many as the second argument."""
PADDING = 0
"""Any token: no position that is read attends to it."""


def recomputing(model: LongContextGPT, *, eod: int | None = None) -> Generate:
    """Return greedy generation by the model; it ends before the token `eod`, if one is given."""

    def generate(prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        ids = list(prompt_ids)
        for _ in range(max_new_tokens):
            [token] = greedy_tokens(model, ids, [len(ids) - 1])
            if token == eod:
                break
            ids.append(token)
        return ids[len(prompt_ids) :]

    return generate


def would_generate(
    model: LongContextGPT, prompt_ids: Sequence[int], answer_ids: Sequence[int]
) -> bool:
    """Return whether greedy decoding of the prompt begins with exactly this answer."""
    ids = [*prompt_ids, *answer_ids]
    asked = range(len(prompt_ids) - 1, len(ids) - 1)
    return greedy_tokens(model, ids, asked) == list(answer_ids)


@torch.no_grad()
def greedy_tokens(model: LongContextGPT, ids: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Return the most likely next token after each of the positions, ascending.

    Raises:
        ValueError: if a position is not one of the sequence.
    """
    if not positions:
        return []
    if min(positions) < 0 or max(positions) >= len(ids):
        raise ValueError(
            f"the sequence has {len(ids):,} tokens; give it a prompt that is not empty"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    length = padded_length(len(ids))
    tokens = torch.full((1, length), PADDING, dtype=torch.int64)
    tokens[0, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    wanted = torch.zeros(1, length, dtype=torch.bool)
    wanted[0, list(positions)] = True
    shard = get_batch_on_this_cp_rank(
        {
            "tokens": tokens.to(device),
            "positions": torch.arange(length, device=device)[None].contiguous(),
            "wanted": wanted.to(device),
        }
    )
    here = shard["wanted"][0]
    with logits_only_of(model, here):
        logits = model(shard["tokens"], shard["positions"], None)[0].float()  # [wanted, V / tp]
    # Of every position of the sequence, -1 where it is another context rank's.
    best = torch.full((length,), -1, dtype=torch.int64, device=device)
    best[shard["positions"][0][here]] = _argmax(logits)
    dist.all_reduce(best, dist.ReduceOp.MAX, group=parallel_state.get_context_parallel_group())
    found: list[int] = best[torch.tensor(list(positions), device=device)].tolist()
    return found


def padded_length(tokens: int) -> int:
    """Return the length to which a sequence is padded for the ranks as they are now.

    Context ranks take two chunks of it each, and tensor ranks a part of each chunk if the model
    uses sequence parallelism.
    """
    cp = parallel_state.get_context_parallel_world_size()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    unit = 2 * cp * tp if cp > 1 else tp
    return -(-tokens // unit) * unit


def _argmax(logits: Tensor) -> Tensor:
    """Return the id of the largest logit over tensor ranks, [n] of logits [n, V / tp]."""
    group = parallel_state.get_tensor_model_parallel_group()
    rows = logits.shape[1]
    value, own = logits.max(dim=1)
    best = value.clone()
    dist.all_reduce(best, dist.ReduceOp.MAX, group=group)
    ids = own + rows * parallel_state.get_tensor_model_parallel_rank()
    # max() may return any of equal logits of a rank; the lowest is taken on every number of ranks.
    ids = torch.where(value == best, ids, torch.iinfo(torch.int64).max)
    dist.all_reduce(ids, dist.ReduceOp.MIN, group=group)
    return ids
