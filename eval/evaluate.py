# SPDX-License-Identifier: Apache-2.0
"""Evaluate the stages of a run: loss by position and the passkey grid, one JSON file per stage.

Runs on every rank of a torchrun job; `longhaul evaluate` and `longhaul run` launch it.
"""

from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray

from custom_modules.gpt.model import LongContextGPT
from data.held_out import long_documents
from data.store import Manifest
from eval import load_model
from eval.distributed import parallel_ranks
from eval.loss_by_position import BUCKET, loss_by_position, mean_over
from eval.passkey import DIGITS, prompts, score
from eval.report.evaluations import write_evaluation
from eval.run_folder import ByPosition, Evaluation, Passkey, RangeMean, read_stage
from recipes.checkpoints.marker import steps_taken
from recipes.spec.naming import stage_folder

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def evaluate(
    run: str,
    stages: list[str],
    store: str,
    lengths: list[int],
    documents: int = 24,
    trials: int = 2,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    device: str = "cpu",
    verify: bool = True,
) -> None:
    """Write `RUN/eval/<stage>.json` for each stage, at the longest of `lengths`.

    Existing evaluations with other settings are kept (`eval.report.evaluations`).

    `lengths` are the contexts of the ladder: the bounds of the ranges of positions and the lengths
    of the passkey prompts. With `trials` 0 there are no prompts. The remaining ranks are data
    parallel. Checksums of checkpoints are verified unless `verify` is False.
    """
    with parallel_ranks(tensor_parallel, context_parallel, device):
        manifest = Manifest.load(store)
        longest = max(lengths)
        texts = list(islice(long_documents(manifest, min_tokens=longest + 1), documents))
        if not texts:
            raise ValueError(
                f"{store} has no held-out document of {longest + 1:,} tokens to evaluate on"
            )
        for name in stages:
            folder = stage_folder(Path(run), name)
            step = steps_taken(folder / "checkpoints")
            model = load_model.load(
                folder, seq_length=longest, bf16=device == "cuda", verify=verify
            )
            losses, count = loss_by_position(model, texts, longest)
            grid = passkey_grid(model, manifest, texts, sorted(lengths), trials) if trials else None
            if dist.get_rank() == 0:
                record = read_stage(Path(run), name)
                if record is None:
                    raise ValueError(f"{folder} has no stage.json, which says what was trained")
                found = evaluation(name, record.context, losses, count, lengths, grid)
                write_evaluation(Path(run), replace(found, store=store, step=step))


def evaluation(
    name: str,
    seq_length: int,
    losses: list[float],
    documents: int,
    lengths: list[int],
    grid: Passkey | None,
) -> Evaluation:
    """Return the evaluation of one stage; `losses` are by bucket of positions."""
    longest = max(lengths)
    return Evaluation(
        stage=name,
        seq_length=seq_length,
        eval_length=longest,
        documents=documents,
        tokens=documents * longest,
        by_position=ByPosition(
            edges=tuple(range(0, longest + 1, BUCKET)),
            loss=tuple(losses),
            tokens=(documents * BUCKET,) * len(losses),
        ),
        ranges=tuple(
            RangeMean(
                start=start,
                stop=stop,
                loss=mean_over(losses, start, stop),
                tokens=documents * (stop - start),
            )
            for start, stop in pairwise([0, *sorted(lengths)])
        ),
        passkey=grid,
    )


def passkey_grid(
    model: LongContextGPT,
    manifest: Manifest,
    texts: list[NDArray[np.int64]],
    lengths: list[int],
    trials: int,
) -> Passkey:
    """Return hits and nats by length and depth; prompts are distributed over data ranks."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(manifest.tokenizer_path)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    scores = torch.zeros(len(lengths), len(DEPTHS), 3, dtype=torch.float64, device=device)
    turn = 0
    for row, length in enumerate(lengths):
        for column, depth in enumerate(DEPTHS):
            text = texts[column % len(texts)]
            for prompt in prompts(encode, text, length=length, depth=depth, trials=trials):
                if turn % size == rank:
                    scores[row, column] += torch.tensor(score(model, prompt), device=device)
                turn += 1
    dist.all_reduce(scores, group=parallel_state.get_data_parallel_group())
    answers = scores[..., 2].sum() / (scores.shape[0] * scores.shape[1] * trials)
    return Passkey(
        lengths=tuple(lengths),
        depths=DEPTHS,
        trials=trials,
        digits=DIGITS,
        hits=tuple(tuple(row) for row in (scores[..., 0] / trials).tolist()),
        nats=tuple(tuple(row) for row in (scores[..., 1] / scores[..., 2]).tolist()),
        chance_nats=DIGITS * float(np.log(10)) / float(answers),
    )
