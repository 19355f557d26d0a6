# SPDX-License-Identifier: Apache-2.0
"""What data ranks have a part of each, by Megatron-Core, does not change their steps."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch.distributed.tensor import DTensor

from custom_modules.memory.config import Recompute
from custom_modules.rope.config import RopeScaling
from tests.custom_modules.support import llamas
from tests.custom_modules.support.zigzag import here
from tests.ranks import megatron_backend, run_ranks

STRATEGIES = {"none": None, "optimizer": None, "gradients": "optim_grads",
              "parameters": "optim_grads_params"}  # fmt: skip
Trained = tuple[list[float], dict[str, torch.Tensor], bool]


def trained(sharding: str) -> Trained:
    """Return 4 steps' losses, the parameters after them, and whether backward freed the layers'."""
    made = llamas.ours(
        RopeScaling.base_change(10_000),
        llamas.megatron_weights(llamas.made_up_weights()),
        torch.float32,
        memory={"recompute": Recompute(kind="kept_attention")},
        calculate_per_token_loss=True,
    )
    fsdp, distributed = STRATEGIES[sharding], sharding != "none"
    if fsdp:
        made.config.use_megatron_fsdp = True  # as NeMo sets it; no field of the config
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=bool(fsdp),
        overlap_param_gather=bool(fsdp),
        use_megatron_fsdp=bool(fsdp),
        data_parallel_sharding_strategy=fsdp or "no_shard",
    )
    names = [name for name, _ in made.named_parameters()]
    wrapper = FullyShardedDataParallel if fsdp else DistributedDataParallel
    ddp = wrapper(made.config, config, made)
    # With Adam's usual eps a gradient near zero is divided by its own size: another order of sums,
    # in which CPUs differ, would be another step. With this one a step is at most as far off as the
    # gradient: lr / eps is 1.
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            adam_eps=1e-2,
            use_distributed_optimizer=distributed,
            clip_grad=1.0,
        ),
        [ddp],
    )
    draw = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(4):
        tokens = here(torch.randint(0, llamas.VOCAB, (2, 16), generator=draw, device="cpu"))
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        for micro_batch in tokens.split(1):
            loss = ddp(micro_batch, torch.arange(16)[None], None, labels=micro_batch).sum() / 64
            loss.backward()
            losses.append(float(loss))
        freed = all(p.untyped_storage().size() == 0 for p in made.decoder.layers.parameters())
        ddp.finish_grad_sync()
        optimizer.step()
    if fsdp:
        named = dict(ddp.param_and_grad_buffer.optimizer_named_parameters)
        after = {name: _whole(named[name]) for name in names}
    else:
        after = {name: p.detach().flatten().clone() for name, p in made.named_parameters()}
    return losses, after, freed


def _whole(shard: DTensor) -> torch.Tensor:
    """Return the parameter, of which each rank has a part of any size."""
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, shard.to_local().detach().flatten().clone())
    return torch.cat(parts)


def train() -> dict[str, Trained]:
    with megatron_backend():
        parallel_state.initialize_model_parallel()
        return {sharding: trained(sharding) for sharding in STRATEGIES}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Trained]]:
    return run_ranks(train, 2)


@pytest.mark.parity
@pytest.mark.parametrize("sharding", [name for name in STRATEGIES if name != "none"])
def test_two_ranks_that_shard_take_the_steps_of_two_that_do_not(ranks, sharding):
    for rank in ranks:
        losses, parameters, _ = rank["none"]
        ours, sharded, freed = rank[sharding]
        assert ours == pytest.approx(losses, rel=1e-5)
        for name, parameter in parameters.items():
            torch.testing.assert_close(sharded[name], parameter, rtol=1e-5, atol=1e-6)
        assert freed == (sharding == "parameters")
