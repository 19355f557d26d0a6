# SPDX-License-Identifier: Apache-2.0
r"""Passkey retrieval: a number planted in long text, asked for at its end.

    <text> \nPASSKEY = 48213\n <text> \nassert PASSKEY == 48213
           ^ at `depth` of the length                     ^^^^^ the answer that is scored

The number has the same tokens in both places (`eval.answer_tokens`), so that copying them answers.
The documents of `data.long_range` in the form `code` ask in the same words.

The answer is scored by one forward pass over prompt and answer: greedy decoding would produce it
exactly if and only if each of its tokens is the argmax given the ones before, so `hit` needs no
generation. `nats` is the mean loss per answer token, a finer measure for small models. The text is
held-out documents; the digits are drawn from a seed, the same for every checkpoint.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from numpy.typing import NDArray
from torch import Tensor, nn

from custom_modules.gpt.model import LongContextGPT
from eval.answer_tokens import inside, question_and_answer

DIGITS = 5
NEEDLE = "\nPASSKEY = {number}\n"
QUESTION = "\nassert PASSKEY == "
PASSKEY_SEED = 0
PROMPT_VERSION = 2
"""Results of other versions cannot be compared. 1: question and answer were encoded apart."""


@dataclass(frozen=True)
class Prompt:
    """Hold one prompt as token ids, its answer at the end."""

    tokens: NDArray[np.int64]
    answer: int
    """Tokens of the answer, the last ones of `tokens`."""


def prompts(
    encode: Callable[[str], Sequence[int]],
    text: NDArray[np.int64],
    *,
    length: int,
    depth: float,
    trials: int,
    seed: int = PASSKEY_SEED,
) -> list[Prompt]:
    """Return prompts of exactly `length` tokens with the needle at `depth` (0 first, 1 last).

    `text` is a document of at least `length` tokens. Raises ValueError if the needle and the
    question alone are longer than `length`.
    """
    numbers = random.Random(f"{seed} {length} {depth}")
    made = []
    for _ in range(trials):
        number = "".join(numbers.choices("0123456789", k=DIGITS))
        needle = inside(encode, NEEDLE.format(number=number))
        question, answer = question_and_answer(encode, QUESTION, number, after="\n")
        room = length - len(needle) - len(question) - len(answer)
        if room < 0:
            raise ValueError(
                f"a passkey prompt of {length} tokens is too short: needle, question and answer "
                f"take {length - room}"
            )
        start = numbers.randrange(len(text) - room + 1)
        before = round(depth * room)
        hay = text[start : start + room]
        tokens = np.concatenate((hay[:before], needle, hay[before:], question, answer))
        made.append(Prompt(tokens=tokens.astype(np.int64), answer=len(answer)))
    return made


@torch.no_grad()
def score(model: LongContextGPT, prompt: Prompt) -> tuple[float, float, float]:
    """Return hit (0 or 1), summed nats and number of tokens of the answer.

    Each rank holds the logits of its positions for its part of the vocabulary: maximum and
    log-sum-exp are taken over tensor ranks, sums over context ranks. A token is a hit if no
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
    asked = (shard["positions"] >= length - 1 - prompt.answer) & (shard["positions"] < length - 1)
    with logits_only_of(model, asked[0]):
        logits = model(shard["tokens"], shard["positions"], None)[0].float()  # [asked, V / tp]
    targets = shard["next"][asked]

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


@contextmanager
def logits_only_of(model: LongContextGPT, asked: Tensor) -> Iterator[None]:
    """Return the logits of the positions that `asked`, a mask [s] of this rank's, selects.

    Only their hidden states pass through the output layer: the logits of a prompt of 1M tokens and
    a vocabulary of 128K would be 256 GiB.
    """
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
