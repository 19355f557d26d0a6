# SPDX-License-Identifier: Apache-2.0
"""Parameters that the distributed optimizer gathers while the forward runs, and gradients that it
reduces while the backward does: what reads a weight by itself waits, what adds one does it once.
"""

from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.gpt.param_gather import finish_gather
from custom_modules.memory.config import Offload, Recompute, Tiling
from custom_modules.rope.config import RopeScaling
from tests.custom_modules.support import llamas
from tests.custom_modules.support.zigzag import here
from tests.ranks import megatron_backend, run_ranks

KINDS = ("ulysses", "head_chunked")
MEMORY = {
    "recompute": Recompute(kind="kept_attention"),
    "tiling": Tiling(loss=True, loss_tile=5, mlp=True, mlp_tile=5),
    "offload": Offload(tensors="both", cap_gib=1),
}


def losses(kind: str, memory: dict[str, Any], tied: bool) -> list[float]:
    """Return the loss of each of 5 steps on a data rank; all have the same sequence."""
    weights = llamas.megatron_weights(llamas.made_up_weights())
    if tied:
        weights.pop("output_layer.weight")
    made = llamas.ours(
        RopeScaling.base_change(10_000),
        weights,
        torch.float32,
        cp=ContextParallelKind(kind=kind),
        memory=memory,
        tied=tied,
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
    draw = torch.Generator().manual_seed(0)
    tokens = here(torch.randint(0, llamas.VOCAB, (1, 16), generator=draw, device="cpu"))
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


def train() -> dict[tuple[str, bool, bool], list[float]]:
    """Return losses by kind, with the memory stack or without, embeddings tied or not."""
    with megatron_backend():
        parallel_state.initialize_model_parallel()
        return {
            (kind, small, tied): losses(kind, MEMORY if small else {}, tied)
            for kind in KINDS
            for small in (False, True)
            for tied in (False, True)
        }


@pytest.fixture(scope="module")
def trained():
    return run_ranks(train, 2)


@pytest.mark.parity
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("small", [False, True], ids=["plain", "memory stack"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_read_after_the_gather_has_ended(kind, small, tied, trained):
    first, second = trained
    assert first[kind, small, tied] == second[kind, small, tied]
    assert first[kind, small, tied] == pytest.approx(first["ulysses", False, tied], rel=1e-5)


def test_a_weight_that_fsdp_frees_is_not_read_behind_its_back():
    module = torch.nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda *given: None, with_kwargs=True)  # as Megatron FSDP does
    with pytest.raises(ValueError, match="Linear is sharded by Megatron FSDP"):
        finish_gather(module)


@pytest.mark.parity
def test_the_model_learns(trained):
    losses = trained[0]["ulysses", False, False]
    assert losses[-1] < 0.5 * losses[0]
