# SPDX-License-Identifier: Apache-2.0
"""Read facts of a resolved recipe: ranks, tokens, layout, folders."""

import os
from pathlib import Path

import fiddle as fdl
import nemo_run as run

from custom_modules.callbacks.step_log import StepLog
from custom_modules.context_parallel.config import Degrees, degrees
from custom_modules.rope.layers import LayerPattern
from recipes.checkpoints.marker import checkpoints_in
from recipes.nemo2.settings import MEGATRON_FSDP
from recipes.nemo2.strategy import CpuStrategy
from recipes.spec.families import FAMILIES
from recipes.spec.layout import ContextParallel, Fp8, Layout, Sharding


def world_size(recipe: run.Partial) -> int:
    """Return the ranks that the trainer of the recipe starts."""
    ranks = 1
    for name in ("devices", "num_nodes"):
        value = getattr(recipe.trainer, name)
        if not isinstance(value, int):
            raise ValueError(f"trainer.{name} is {value!r}; write a number")
        ranks *= value
    return ranks


def tokens_per_batch(recipe: run.Partial) -> int:
    """Return the tokens of one optimizer step, from the data module."""
    return int(recipe.data.global_batch_size) * int(recipe.data.seq_length)


def trained_length(recipe: run.Partial) -> int:
    """Return the context that the stage trains for: its target if it trains short."""
    given = fdl.ordered_arguments(recipe.data)
    if "rope_scale" in given:
        return fdl.build(recipe.model.config.rope).reach or int(recipe.data.seq_length)
    skips = given.get("positions")
    if skips is not None:
        return int(skips.target_length)
    return int(given.get("recovers") or recipe.data.seq_length)


def context_parallelism(recipe: run.Partial) -> Degrees:
    """Return the degrees of context parallelism that the recipe sets or `auto` chooses."""
    config, strategy = recipe.model.config, recipe.trainer.strategy
    tp = strategy.tensor_model_parallel_size
    return degrees(
        fdl.build(config.cp),
        size=strategy.context_parallel_size,
        heads=config.num_attention_heads // tp,
        kv_heads=config.num_query_groups // tp,
        head_dim=config.kv_channels,
        seq_length=recipe.data.seq_length,
        ranks_per_link=max(1, recipe.trainer.devices // tp),
        chunks=not wide_qk_norm(recipe),
    )


def wide_qk_norm(recipe: run.Partial) -> bool:
    """Return whether the family normalises queries and keys over all heads of a token at once."""
    target = fdl.get_callable(recipe.model.config)
    name = f"{target.__module__}.{target.__name__}"
    return any(family.config_class == name and family.wide_qk_norm for family in FAMILIES.values())


def pattern_of(recipe: run.Partial) -> LayerPattern | None:
    """Return which layers of the model differ; None if all are alike."""
    given = fdl.ordered_arguments(recipe.model.config, include_defaults=True).get("pattern")
    built = None if given is None else fdl.build(given)
    assert built is None or isinstance(built, LayerPattern)
    return built


def sharding_of(recipe: run.Partial) -> Sharding:
    """Return what is sharded over the ranks that hold the same parameters."""
    ddp = recipe.trainer.strategy.ddp
    if recipe.trainer.strategy.fsdp == "megatron":
        by_megatron = {theirs: ours for ours, theirs in MEGATRON_FSDP.items()}
        return by_megatron[ddp.data_parallel_sharding_strategy]
    return "optimizer" if ddp.use_distributed_optimizer else "none"


def fp8(recipe: run.Partial) -> Fp8:
    """Return the FP8 settings of NeMo's precision plugin."""
    plugin = recipe.trainer.plugins
    if not plugin.fp8:
        return Fp8()
    some = plugin.first_last_layers_bf16
    return Fp8(
        recipe=plugin.fp8_recipe,
        bf16_first=plugin.num_layers_at_start_in_bf16 if some else 0,
        bf16_last=plugin.num_layers_at_end_in_bf16 if some else 0,
    )


def rank_tokens(recipe: run.Partial) -> int:
    """Return the tokens of a micro-batch on one rank, before sequence parallelism."""
    per_sequence = recipe.data.seq_length // recipe.trainer.strategy.context_parallel_size
    return int(per_sequence * recipe.data.micro_batch_size)


def device_of(recipe: run.Partial) -> str:
    """Return `cpu` or `cuda`."""
    return "cpu" if issubclass(recipe.trainer.strategy.__fn_or_cls__, CpuStrategy) else "cuda"


def step_log(recipe: run.Partial) -> run.Config:
    """Return the callback that writes a line a step; raise ValueError for a recipe without one."""
    for callback in recipe.trainer.callbacks:
        if isinstance(callback, run.Config) and callback.__fn_or_cls__ is StepLog:
            return callback
    raise ValueError("trainer.callbacks has no StepLog, which writes what each step did; add it")


def folder_of(recipe: run.Partial) -> Path:
    """Return the folder a stage writes to."""
    return Path(step_log(recipe).path).parent


def absolute(recipe: run.Partial) -> None:
    """Make every path of the recipe absolute, since ranks may start in another folder."""
    recipe.data.store = os.path.abspath(recipe.data.store)
    for callback in recipe.trainer.callbacks:
        for name in {"path", "folder"} & set(callback.__arguments__):
            setattr(callback, name, os.path.abspath(getattr(callback, name)))
    recipe.log.explicit_log_dir = os.path.abspath(recipe.log.explicit_log_dir)
    recipe.log.ckpt.dirpath = os.path.abspath(recipe.log.ckpt.dirpath)
    recipe.log.tensorboard.save_dir = os.path.abspath(recipe.log.tensorboard.save_dir)
    recipe.resume.resume_from_directory = os.path.abspath(recipe.resume.resume_from_directory)
    if recipe.resume.start is not None:
        recipe.resume.start = str(checkpoints_in(Path(recipe.resume.start)).absolute())


def layout_of(recipe: run.Partial) -> Layout:
    """Return the layout of a resolved recipe."""
    config, strategy, optim = recipe.model.config, recipe.trainer.strategy, recipe.optim.config
    tp = int(strategy.tensor_model_parallel_size)
    cp = int(strategy.context_parallel_size)
    pp = int(strategy.pipeline_model_parallel_size)
    on_cpu = device_of(recipe) == "cpu"
    offloads = optim.optimizer_cpu_offload and not on_cpu  # on CPU ranks nothing is moved
    offloaded = optim.optimizer_offload_fraction if offloads else 0.0
    return Layout(
        tp=tp,
        cp=ContextParallel(size=cp, how=fdl.build(config.cp)),
        pp=pp,
        vpp=int(strategy.virtual_pipeline_model_parallel_size or 1),
        dp=world_size(recipe) // (tp * cp * pp),
        ep=int(strategy.expert_model_parallel_size),
        etp=strategy.expert_tensor_parallel_size,
        micro_batch=int(recipe.data.micro_batch_size),
        recompute=fdl.build(config.recompute),
        tiling=fdl.build(config.tiling),
        offload=fdl.build(config.offload),
        sharding=sharding_of(recipe),
        optimizer_offload=float(offloaded),
        fp8=fp8(recipe),
        precision="fp32" if recipe.trainer.plugins.precision == "32" else "bf16",
        device="cpu" if on_cpu else "cuda",
    )
