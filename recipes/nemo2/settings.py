# SPDX-License-Identifier: Apache-2.0
"""Settings of a recipe that span several of NeMo's configs: paths, sharding, offload, FP8."""

from pathlib import Path

import nemo_run as run

from custom_modules.callbacks.hang_guard import HangGuard
from custom_modules.callbacks.loss_guard import LossGuard
from custom_modules.callbacks.step_log import StepLog
from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.memory.config import Offload, Recompute, Tiling
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.layers import LayerPattern
from data.mixture.config import Mix
from recipes.spec.gate import Gate, SuiteThreshold
from recipes.spec.layout import Fp8, Sharding
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import recipe_name, stage_folder, start_folder
from recipes.spec.stage import Ladder, Stage
from recipes.spec.suites import SuiteRun

MEGATRON_FSDP: dict[Sharding, str] = {
    "gradients": "optim_grads",
    "parameters": "optim_grads_params",
}
"""Megatron FSDP's name of each sharding; other shardings do not use FSDP."""


def as_config_node(
    noun: RopeScaling
    | LayerPattern
    | ContextParallelKind
    | Recompute
    | Tiling
    | Offload
    | Gate
    | SuiteRun
    | SuiteThreshold,
) -> run.Config:
    """Return a description as a node of the tree, so that overrides can set its fields.

    Tuples become lists, the only sequence of YAML and nemo-run's overrides. A rotation that
    stretches another has that as a nested node, and so has a pattern of layers the rotation of
    local ones. A gate's thresholds of scores are left out: the jobs that run suites and RULER have
    them.
    """
    fields = {name: getattr(noun, name) for name in type(noun).__dataclass_fields__}
    if isinstance(noun, RopeScaling) and noun.before is not None:
        fields["before"] = as_config_node(noun.before)
    if isinstance(noun, LayerPattern) and noun.local_rope is not None:
        fields["local_rope"] = as_config_node(noun.local_rope)
    if isinstance(noun, Gate):
        del fields["suites"], fields["ruler"]
    lists = {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
    return run.Config(type(noun), **fields | lists)


def mix_node(mix: Mix) -> run.Config:
    """Return a mix as a node of the tree, with the settings that are not the default."""
    fields = {
        name: getattr(mix, name)
        for name, field in Mix.__dataclass_fields__.items()
        if getattr(mix, name) != field.default
    }
    for name in ("shares", "other_lengths"):
        if name in fields:
            fields[name] = [run.Config(type(row), **vars(row)) for row in fields[name]]
    return run.Config(Mix, **fields)


def place(
    recipe: run.Partial, card: ModelCard, ladder: Ladder, stage: Stage, *, run_to: Path, store: Path
) -> None:
    """Set every path of the recipe: outputs under `run_to`, and inputs."""
    folder = stage_folder(run_to, recipe_name(card, ladder, stage))
    start = start_folder(card, ladder, stage, run_to)
    recipe.data.store = str(store)
    for callback in recipe.trainer.callbacks:
        target = callback.__fn_or_cls__ if isinstance(callback, run.Config) else None
        if target is StepLog:
            callback.path = str(folder / "metrics.jsonl")
        elif target is LossGuard:
            callback.path = str(folder / "rewinds.jsonl")
        elif target is HangGuard:
            callback.folder = str(folder / "stacks")
    recipe.log.name = folder.name
    recipe.log.explicit_log_dir = str(folder / "logs")
    recipe.log.ckpt.dirpath = str(folder / "checkpoints")
    recipe.log.tensorboard.save_dir = str(folder)
    recipe.resume.resume_from_directory = str(folder / "checkpoints")
    recipe.resume.start = None if start is None else str(start)


def shard(recipe: run.Partial, sharding: Sharding) -> None:
    """Set what is sharded over the ranks that hold the same parameters."""
    strategy, distributed = recipe.trainer.strategy, sharding != "none"
    strategy.ddp.use_distributed_optimizer = distributed
    strategy.ddp.overlap_param_gather = distributed  # without it every rank updates all of them
    recipe.optim.config.use_distributed_optimizer = distributed
    if sharding in MEGATRON_FSDP:
        strategy.fsdp = "megatron"
        strategy.ddp.use_megatron_fsdp = True
        strategy.ddp.data_parallel_sharding_strategy = MEGATRON_FSDP[sharding]
        strategy.save_ckpt_format = "fsdp_dtensor"
        strategy.ckpt_async_save = False  # NeMo writes this format synchronously
        recipe.model.config.gradient_accumulation_fusion = False  # FSDP manages the gradients


def offload_optimizer(recipe: run.Partial, fraction: float) -> None:
    """Offload a fraction of the optimizer's state and step to the CPU, or none."""
    config, offloads = recipe.optim.config, fraction != 0
    config.optimizer_cpu_offload = offloads
    config.optimizer_offload_fraction = fraction
    config.overlap_cpu_optimizer_d2h_h2d = offloads
    config.use_precision_aware_optimizer = offloads  # otherwise fp32 weights also stay on the GPU


def compute_in_fp8(recipe: run.Partial, fp8: Fp8) -> None:
    """Set the FP8 recipe in NeMo's precision plugin, which overwrites the model's FP8 fields."""
    plugin = recipe.trainer.plugins
    plugin.fp8 = fp8.format
    plugin.fp8_recipe = fp8.recipe
    plugin.first_last_layers_bf16 = bool(fp8.bf16_first or fp8.bf16_last)
    plugin.num_layers_at_start_in_bf16 = fp8.bf16_first
    plugin.num_layers_at_end_in_bf16 = fp8.bf16_last
    if fp8.recipe == "delayed":
        plugin.fp8_amax_history_len = 1024  # as in NeMo's own recipe of delayed scaling
        plugin.fp8_amax_compute_algo = "max"
