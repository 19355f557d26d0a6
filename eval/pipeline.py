# SPDX-License-Identifier: Apache-2.0
"""One forward through pipeline stages, and results that every stage has.

    first stage   tokens -> layers -> hidden states ->
    next stages                                      -> layers -> hidden states ->
    last stage                                                                   -> layers -> losses

A stage receives hidden states [s / cp, b, h] from the stage before, or [s / cp / tp, b, h] under
sequence parallelism. It does not wait for the result of its sequence, so the stages compute as
many sequences at a time as there are stages. Measurements therefore keep what they sum up on the
last stage, and share it at the end (`summed`, `from_last_stage`); other stages hold zeros.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from custom_modules.gpt.model import LongContextGPT


@torch.no_grad()
def forward(
    model: LongContextGPT, tokens: Tensor, positions: Tensor, **inputs: Any
) -> Tensor | None:
    """Return the model's output for this rank's shard [b, s / cp]; None before the last stage.

    `inputs` are further ones of the model. Every rank of the pipeline calls it with the same
    sequence.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        whole: Tensor = model(tokens, positions, None, **inputs)
        return whole
    sequences, length = tokens.shape
    if model.config.sequence_parallel:
        length //= parallel_state.get_tensor_model_parallel_world_size()
    stages = P2PCommunicator(group, model.config)
    shape = (length, sequences, model.config.hidden_size)
    model.set_input_tensor(stages.recv_forward(shape, is_first_stage=model.pre_process))
    out: Tensor = model(tokens, positions, None, **inputs)
    model.set_input_tensor(None)  # it is as large as all hidden states of the sequence
    stages.send_forward(out, is_last_stage=model.post_process)
    return out if model.post_process else None


def losses(
    model: LongContextGPT, tokens: Tensor, positions: Tensor, labels: Tensor, **inputs: Any
) -> Tensor:
    """Return the loss of each label, [b, s / cp]; zeros before the last stage."""
    found = forward(model, tokens, positions, labels=labels, **inputs)
    return torch.zeros(labels.shape, device=labels.device) if found is None else found


def summed(values: Tensor) -> Tensor:
    """Add up values of the last stage over data and context ranks in place; all ranks have them."""
    dist.all_reduce(
        values, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    return from_last_stage(values)


def from_last_stage(values: Tensor) -> Tensor:
    """Replace the values of all stages by those of the last one."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(values, last, group=group)
    return values
