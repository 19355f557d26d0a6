# SPDX-License-Identifier: Apache-2.0
"""Adapt a recipe to CPU ranks: gloo, plain kernels, no Transformer Engine."""

import fiddle as fdl
import nemo_run as run

from custom_modules.callbacks.stragglers import Stragglers
from recipes.nemo2.settings import offload_optimizer
from recipes.nemo2.strategy import CpuStrategy


def on_cpu(recipe: run.Partial) -> None:
    """Turn a recipe for GPUs into one for CPU ranks under gloo with the same numerics."""
    strategy = recipe.trainer.strategy
    fdl.update_callable(strategy, CpuStrategy)
    strategy.process_group_backend = "gloo"
    strategy.ckpt_async_save = False  # there is no device to copy from asynchronously
    strategy.ddp.overlap_grad_reduce = False
    strategy.ddp.overlap_param_gather = False
    if recipe.optim.config.optimizer_cpu_offload:
        offload_optimizer(recipe, 0.0)  # it is on the CPU anyway
    recipe.trainer.accelerator = "cpu"
    kept = [one for one in recipe.trainer.callbacks if one.__fn_or_cls__ is not Stragglers]
    recipe.trainer.callbacks = kept
    recipe.data.num_workers = 0
    recipe.data.pin_memory = False
    plain_kernels(recipe.model.config)


def plain_kernels(config: run.Config) -> None:
    """Set a model config to kernels that run on CPU; they compute the same as the fused ones."""
    config.transformer_engine = False
    config.attention_kernel = "auto"
    config.use_cpu_initialization = True
    config.bias_activation_fusion = False
    config.bias_dropout_fusion = False
    config.masked_softmax_fusion = False
    config.gradient_accumulation_fusion = False
    config.persist_layer_norm = False
    if config.num_moe_experts:
        config.moe_permute_fusion = False
        config.moe_router_fusion = False
        config.moe_grouped_gemm = False
