# SPDX-License-Identifier: Apache-2.0
"""The passkey grid of a model: prompts by length and depth, distributed over data ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray

from custom_modules.gpt.model import LongContextGPT
from data.store import Manifest
from eval import pipeline
from eval.answers.passkey import DIGITS, PROMPT_VERSION, Prompt, prompts, score
from eval.answers.tokens import text_encoder
from eval.finished_parts import FinishedParts
from eval.measurements import Passkey
from recipes.spec.schema import Number

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Prompts:
    """Passkey prompts: their lengths in tokens, depths of the needle, and prompts per cell."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...] = DEPTHS
    trials: int = 2


def passkey_grid(
    parts: FinishedParts,
    model: Callable[[], LongContextGPT],
    manifest: Manifest,
    texts: list[NDArray[np.int64]],
    asked: Prompts,
) -> Passkey:
    """Return hits and nats by length and depth; each length is a part of its own."""
    encode = text_encoder(manifest.tokenizer_path)

    def row(length: int) -> list[list[float]]:
        cells = [
            prompts(
                encode,
                texts[at % len(texts)],
                length=length,
                depth=depth,
                trials=asked.trials,
                first=manifest.first_tokens,
            )
            for at, depth in enumerate(asked.depths)
        ]
        return passkey_row(model(), cells)

    rows = [
        parts.part(f"passkeys of {length:,} tokens", list[list[Number]], partial(row, length))
        for length in asked.lengths
    ]
    scores = np.array(rows, dtype=np.float64)
    answers = scores[..., 2].mean() / asked.trials
    return Passkey(
        lengths=asked.lengths,
        depths=asked.depths,
        trials=asked.trials,
        digits=DIGITS,
        hits=tuple(tuple(row) for row in (scores[..., 0] / asked.trials).tolist()),
        nats=tuple(tuple(row) for row in (scores[..., 1] / scores[..., 2]).tolist()),
        chance_nats=DIGITS * float(np.log(10)) / float(answers),
        prompt_version=PROMPT_VERSION,
    )


def passkey_row(model: LongContextGPT, cells: Sequence[Sequence[Prompt]]) -> list[list[float]]:
    """Return hits, summed nats and answer tokens of each cell of prompts of one length.

    The prompts are distributed over data ranks; the last pipeline stage tells the others.
    """
    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    scores = torch.zeros(len(cells), 3, dtype=torch.float64, device=device)
    numbered = enumerate((at, prompt) for at, cell in enumerate(cells) for prompt in cell)
    for number, (at, prompt) in numbered:
        if number % size == rank:
            scores[at] += torch.tensor(score(model, prompt), device=device)
    dist.all_reduce(scores, group=parallel_state.get_data_parallel_group())
    return cast(list[list[float]], pipeline.from_last_stage(scores).tolist())
