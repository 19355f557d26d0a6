# SPDX-License-Identifier: Apache-2.0
"""The size of a model and the tokens that it was trained on, which evaluations state."""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from custom_modules.gpt.model import LongContextGPT
from eval.run_folder import read_stage
from recipes.checkpoints.marker import steps_taken
from recipes.spec.naming import stage_folder


def parameters_of(model: LongContextGPT) -> int:
    """Return the parameters of a Megatron model over all tensor ranks and pipeline stages.

    Every rank of the model calls it. The copy of a tied embedding on the last stage is not counted.
    """
    size = model.config.tensor_model_parallel_size
    own = sum(
        each.numel() * (size if getattr(each, "tensor_model_parallel", False) else 1)
        for each in model.parameters()
    )
    tied = model.share_embeddings_and_output_weights
    if tied and model.post_process and not model.pre_process:
        own -= model.output_layer.weight.numel() * size
    total = torch.tensor(own, device=torch.cuda.current_device())
    dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    padding = model.vocab_size - model.vocabulary
    return int(total) - padding * model.config.hidden_size * (1 if tied else 2)


def tokens_seen(run: Path, stage: str) -> int | None:
    """Return the tokens of training up to a stage's newest checkpoint, None if not recorded.

    A stage that starts from another of this run has seen that one's tokens too.
    """
    total, passed = 0, set[str]()
    name = stage
    while name not in passed:
        one_folder = bool(name) and name not in {".", ".."} and not {"/", "\\"} & set(name)
        record = read_stage(run, name) if one_folder else None
        if record is None:
            break
        if not math.isfinite(record.tokens_per_batch):
            return None
        total += steps_taken(stage_folder(run, name) / "checkpoints") * int(record.tokens_per_batch)
        passed.add(name)
        name = record.start
    return total if passed else None
