# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from custom_modules.cpu.torch_adam import sharded_torch_adam
from custom_modules.rope.config import RopeScaling
from tests.custom_modules.support import llamas

pytestmark = pytest.mark.usefixtures("megatron_rank")


class Training:
    """A model under Megatron's data parallelism and its distributed optimizer."""

    def __init__(self) -> None:
        model = llamas.ours(
            RopeScaling.base_change(10_000),
            llamas.megatron_weights(llamas.made_up_weights()),
            torch.float32,
        )
        self.model = DistributedDataParallel(
            model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
        )
        config = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True)
        chained = get_megatron_optimizer(config, [self.model])
        (self.optimizer,) = chained.chained_optimizers

    def train(self, step: int) -> None:
        """Take one optimizer step on tokens of that step."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, llamas.VOCAB, (1, 8), generator=generator)
        self.model.zero_grad_buffer()
        loss = self.model(tokens, torch.arange(8)[None], None, labels=tokens.roll(1))
        loss.sum().backward()
        self.model.finish_grad_sync()
        self.optimizer.step()

    def steps(self) -> list[torch.Tensor]:
        """Return Adam's step count of each parameter."""
        return [state["step"] for state in self.optimizer.optimizer.state.values()]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.module.named_parameters()}

    def sharded_state(self, sharding: str, *, is_loading: bool) -> dict[str, Any]:
        """Return model and optimizer as Megatron writes and reads them."""
        model = self.model.module.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": sharding}
        optimizer = self.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata
        )
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path, sharding: str) -> None:
        state = self.sharded_state(sharding, is_loading=False)
        dist_checkpointing.save(state, str(folder), validate_access_integrity=False)

    def load(self, folder: Path, sharding: str) -> None:
        state = self.sharded_state(sharding, is_loading=True)
        loaded = dist_checkpointing.load(state, str(folder), validate_access_integrity=False)
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])


@pytest.fixture
def trained() -> Training:
    """Return a training of three steps."""
    training = Training()
    for step in range(3):
        training.train(step)
    return training


def test_a_loaded_state_counts_each_step_once(trained):
    trained.optimizer.load_state_dict(trained.optimizer.state_dict())
    assert [step.item() for step in trained.steps()] == [3] * len(trained.steps())
    trained.train(3)
    assert [step.item() for step in trained.steps()] == [4] * len(trained.steps())


def test_no_two_parameters_share_a_step_after_a_load(trained):
    trained.optimizer.load_state_dict(trained.optimizer.state_dict())
    assert len({step.data_ptr() for step in trained.steps()}) == len(trained.steps()) > 1


def test_the_state_of_an_optimizer_that_has_not_stepped_is_at_step_0():
    state = Training().optimizer.state_dict()
    assert {group["step"] for group in state["optimizer"]["param_groups"]} == {0}


@pytest.mark.parametrize("sharding", ["fully_reshardable", "fully_sharded_model_space"])
def test_a_training_continues_from_its_checkpoint_bit_for_bit(trained, sharding, tmp_path):
    trained.save(tmp_path, sharding)
    resumed = Training()
    resumed.load(tmp_path, sharding)
    for step in (3, 4):
        trained.train(step)
        resumed.train(step)
    expected = trained.weights()
    for name, weight in resumed.weights().items():
        assert torch.equal(weight, expected[name]), name


def test_megatron_has_its_own_methods_after_the_context():
    before = dict(vars(DistributedOptimizer))
    with sharded_torch_adam():
        assert dict(vars(DistributedOptimizer)) != before
    assert dict(vars(DistributedOptimizer)) == before
