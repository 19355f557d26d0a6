# SPDX-License-Identifier: Apache-2.0
"""Gradients of a model in Megatron's groups as its data parallel wrapper would sum them."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


def summed_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return each parameter's gradient, summed over the ranks that Megatron sums over: all of a
    sequence, and for what a sequence-parallel rank holds whole, those of its layer too; for an
    expert, all that hold it. Ranks of different sequences have to have the same ones."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = parameter.grad
        if not getattr(parameter, "allreduce", True):  # of an expert
            holders = parallel_state.get_expert_data_parallel_group()
            dist.all_reduce(parameter.grad, group=holders)
            parameter.grad /= parallel_state.get_data_parallel_world_size()
            continue
        dist.all_reduce(parameter.grad, group=parallel_state.get_context_parallel_group())
        if getattr(parameter, "sequence_parallel", False):
            tensor_group = parallel_state.get_tensor_model_parallel_group()
            dist.all_reduce(parameter.grad, group=tensor_group)
    return gradients
