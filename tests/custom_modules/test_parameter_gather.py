# SPDX-License-Identifier: Apache-2.0
"""Parameters that the distributed optimizer gathers while the forward already runs."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from custom_modules.context_parallel_kind import ContextParallelKind
from custom_modules.cpu_backend import cpu_backend
from custom_modules.rope_scaling import RopeScaling
from tests.custom_modules import llamas
from tests.ranks import run_ranks

KINDS = ("ulysses", "head_chunked")


def losses(kind: str) -> list[float]:
    """Return the loss of each of 5 steps on a data rank; all have the same sequence."""
    made = llamas.ours(
        RopeScaling.base_change(10_000),
        llamas.megatron_weights(llamas.made_up_weights()),
        torch.float32,
        cp=ContextParallelKind(kind=kind),
    )
    ddp = DistributedDataParallel(
        made.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
            bucket_size=4000,  # several buckets, so that some are still under way
        ),
        made,
    )
    config = OptimizerConfig(
        optimizer="adam", lr=1e-2, use_distributed_optimizer=True, clip_grad=0.0
    )
    optimizer = get_megatron_optimizer(config, [ddp])
    tokens = torch.randint(0, llamas.VOCAB, (1, 16), generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(5):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = ddp(tokens, torch.arange(16)[None], None, labels=tokens).sum()
        loss.backward()
        ddp.finish_grad_sync()
        optimizer.step()
        found.append(float(loss))
    return found


def train() -> dict[str, list[float]]:
    with cpu_backend(force=True):
        parallel_state.initialize_model_parallel()
        return {kind: losses(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def trained():
    return run_ranks(train, 2)


def test_head_chunked_attention_reads_its_weight_after_the_gather_has_ended(trained):
    first, second = trained
    assert first["head_chunked"] == second["head_chunked"]
    assert first["head_chunked"] == pytest.approx(first["ulysses"], rel=1e-5)
    assert first["ulysses"][-1] < 0.5 * first["ulysses"][0]
