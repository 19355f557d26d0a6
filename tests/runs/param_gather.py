# SPDX-License-Identifier: Apache-2.0
"""Requires of a run on ranks that its parameters are gathered while the model computes."""

from lightning.pytorch import Callback, LightningModule, Trainer


class RequireParamGather(Callback):
    """Fail where a step begins and Megatron's wrapper does not gather parameters in hooks."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_) -> None:
        for chunk in trainer.strategy.megatron_parallel:
            assert chunk.module.ddp_config.overlap_param_gather
            assert chunk.module.use_forward_hook
            assert chunk.module.remove_forward_pre_hook_handles
        self.steps += 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.steps == trainer.max_steps
