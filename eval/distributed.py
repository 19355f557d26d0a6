# SPDX-License-Identifier: Apache-2.0
"""Parallel groups of a torchrun job for one evaluation."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from custom_modules.cpu.backend import cpu_backend


@contextmanager
def parallel_ranks(
    tensor_parallel: int, context_parallel: int, device: str, *, pipeline_parallel: int = 1
) -> Iterator[None]:
    """Join the job's process group and Megatron's parallel groups; `device` is cpu or cuda.

    The remaining ranks are data parallel. All groups are destroyed at the end.
    """
    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(cpu_backend(force=True))
        else:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
        stack.callback(dist.destroy_process_group)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_parallel,
            pipeline_model_parallel_size=pipeline_parallel,
            context_parallel_size=context_parallel,
        )
        stack.callback(parallel_state.destroy_model_parallel)
        yield


def shared_out(lengths: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each prompt: the longest first, each to the rank with the least to do.

    What a prompt takes is counted as the square of its length.
    """
    load = [0] * ranks
    of_prompt = [0] * len(lengths)
    for at in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        of_prompt[at] = load.index(min(load))
        load[of_prompt[at]] += lengths[at] ** 2
    return of_prompt
