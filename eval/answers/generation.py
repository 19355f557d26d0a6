# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's model says next, and its greedy answers: generated, or told from one forward.

    tokens_0 = prompt,  tokens_{i+1} = tokens_i + argmax(logits of the last position)

Generation recomputes the whole sequence for every new token: it needs no cache, works under any
context, tensor and pipeline parallelism, and costs as many forwards as tokens. Where only one text
counts as the answer, `would_generate` tells from a single forward over prompt and answer whether
greedy decoding gives it: it does if and only if each token is the argmax given those before.

Every rank calls these functions with the same ids and gets the same result. The vocabulary is
sharded over tensor ranks, so maximum and log-sum-exp are taken over them (of equal logits the
lowest id wins); a position is on one context rank, which tells the others, and the last pipeline
stage tells the stages before it. Sequences are padded on
the right to what the ranks divide; attention is causal, so the padding changes nothing before it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from numpy.typing import NDArray
from torch import Tensor, nn

from custom_modules.gpt.model import LongContextGPT
from eval import pipeline

Ids = Sequence[int] | NDArray[np.integer[Any]]
"""Token ids of one sequence."""
Generate = Callable[[Sequence[int], int], list[int]]
"""Returns the ids that follow a prompt's, at most as many as the second argument."""


class NextTokens(NamedTuple):
    """What a model says after n tokens of a sequence; each [n], on the CPU."""

    nats: Tensor
    """Loss of the token that follows, float64; after the last token of the sequence meaningless."""
    likeliest: Tensor
    """The most likely next token, int64."""


def recomputing(model: LongContextGPT, *, ends: Collection[int] = ()) -> Generate:
    """Return greedy generation by the model; it ends before the first of the tokens `ends`."""

    def generate(prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        ids = list(prompt_ids)
        for _ in range(max_new_tokens):
            token = int(next_tokens(model, ids, len(ids) - 1, len(ids)).likeliest)
            if token in ends:
                break
            ids.append(token)
        return ids[len(prompt_ids) :]

    return generate


def would_generate(
    model: LongContextGPT, prompt_ids: Sequence[int], answer_ids: Sequence[int]
) -> bool:
    """Return whether greedy decoding of the prompt begins with exactly this answer."""
    ids = [*prompt_ids, *answer_ids]
    said = next_tokens(model, ids, len(prompt_ids) - 1, len(ids) - 1)
    return bool(said.likeliest.tolist() == list(answer_ids))


@torch.no_grad()
def next_tokens(
    model: LongContextGPT, tokens: Ids, start: int, stop: int, *, on_all_stages: bool = True
) -> NextTokens:
    """Return what the model says after each of `tokens[start:stop]`, by one forward over all.

    With `on_all_stages` False only the last pipeline stage knows: the others return zeros and may
    begin the next sequence.

    Raises:
        ValueError: if these are not tokens of the sequence, if the model has no row for one of it,
            or if the model's logits are not finite.
    """
    if not 0 <= start <= stop <= len(tokens):
        raise ValueError(
            f"the sequence has {len(tokens):,} tokens; give it a prompt that is not empty"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    length = padded_length(len(tokens))
    sequence = torch.zeros(1, length, dtype=torch.int64)
    sequence[0, : len(tokens)] = torch.as_tensor(tokens)
    if (largest := int(sequence.max())) >= model.vocabulary:
        raise ValueError(
            f"a prompt has the token {largest:,}, a special one, and the model has "
            f"{model.vocabulary:,} rows; take a prompt without a chat template"
        )
    sequence = sequence.to(device)
    shard = get_batch_on_this_cp_rank(
        {
            "tokens": sequence,
            "next": sequence.roll(-1, dims=1),
            "positions": torch.arange(length, device=device)[None].contiguous(),
        }
    )
    asked = (shard["positions"] >= start) & (shard["positions"] < stop)
    with logits_only_of(model, asked[0]):
        logits = pipeline.forward(model, shard["tokens"], shard["positions"])
    found = [
        torch.zeros(stop - start, dtype=kind, device=device)
        for kind in (torch.float64, torch.int64)
    ]
    if logits is not None:  # [1, asked, V / tp]
        of_rank = _over_vocabulary(logits[0].float(), shard["next"][asked])
        places = shard["positions"][asked] - start
        for whole, own in zip(found, of_rank, strict=True):
            whole[places] = own
            dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    if on_all_stages:
        found = [pipeline.from_last_stage(each) for each in found]
    nats, likeliest = (each.cpu() for each in found)
    if not nats.isfinite().all():  # every comparison with NaN is false, which would read as a score
        raise ValueError(
            "the model's logits are not finite, so nothing can be scored; its weights, or this "
            "length, are beyond what it computes"
        )
    return NextTokens(nats, likeliest)


def padded_length(tokens: int) -> int:
    """Return the length to which a sequence is padded for the ranks as they are now.

    Context ranks take two chunks of it each, and tensor ranks a part of each chunk if the model
    uses sequence parallelism.
    """
    cp = parallel_state.get_context_parallel_world_size()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    unit = 2 * cp * tp if cp > 1 else tp
    return -(-tokens // unit) * unit


def _over_vocabulary(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the content of `NextTokens` for targets [n] and logits [n, V / tp]."""
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
    return (best + total.log() - value).double(), likeliest


@contextmanager
def logits_only_of(model: LongContextGPT, asked: Tensor) -> Iterator[None]:
    """Return the logits of the positions that `asked`, a mask [s] of this rank's, selects.

    Only their hidden states pass through the output layer: the logits of a prompt of 1M tokens and
    a vocabulary of 128K would be 256 GiB.
    """
    if not parallel_state.is_pipeline_last_stage():  # others have no output layer
        yield
        return
    layer = model.output_layer
    scattered = layer.sequence_parallel

    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *others = inputs
        return (gathered_rows(hidden, asked) if scattered else hidden[asked], *others)

    handle = layer.register_forward_pre_hook(before)
    layer.sequence_parallel = False  # every tensor rank has all rows that the layer sees
    try:
        yield
    finally:
        layer.sequence_parallel = scattered
        handle.remove()


def gathered_rows(hidden: Tensor, asked: Tensor) -> Tensor:
    """Return the rows of `asked` [s] from hidden states [s / tp, b, h] of sequence parallelism."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    own = asked.chunk(size)[rank]
    first = int(asked[: rank * len(own)].sum())
    rows = hidden.new_zeros(int(asked.sum()), *hidden.shape[1:])
    rows[first : first + int(own.sum())] = hidden[own]
    dist.all_reduce(rows, group=parallel_state.get_tensor_model_parallel_group())
    return rows
