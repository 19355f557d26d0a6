# SPDX-License-Identifier: Apache-2.0
"""Settings of a resolved recipe that NeMo would overwrite or that are not supported."""

import functools
from collections.abc import Iterator
from typing import get_args

import fiddle as fdl
import nemo_run as run

from custom_modules.attention.registry import KernelName
from custom_modules.context_parallel.config import TRANSFORMER_ENGINE_KINDS
from custom_modules.gpt.core_attention import ignored_settings
from custom_modules.memory.config import Recompute
from recipes.nemo2.settings import MEGATRON_FSDP
from recipes.spec.stage import DocumentPolicy

_FSDP_SETTINGS = {
    "trainer.strategy.save_ckpt_format": "fsdp_dtensor",
    "trainer.strategy.ddp.use_megatron_fsdp": True,
    "trainer.strategy.ddp.use_distributed_optimizer": True,
    "trainer.strategy.ddp.overlap_grad_reduce": True,
    "trainer.strategy.ddp.overlap_param_gather": True,
    "model.config.gradient_accumulation_fusion": False,
}

STAGES_OF_ANOTHER_KIND = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "microbatch_group_size_per_vp_stage",
)
"""Settings of pipeline stages that neither the constraints nor the planner know."""


def without_effect(recipe: run.Partial) -> Iterator[str]:
    """Yield one sentence for each setting that NeMo would overwrite or that is not supported."""
    config, strategy = recipe.model.config, recipe.trainer.strategy
    for name in (
        "tensor_model_parallel_size",
        "context_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "sequence_parallel",
    ):
        if name in fdl.ordered_arguments(config):
            yield f"model.config.{name} is overwritten by trainer.strategy.{name}; set that one"
    if recipe.data.documents not in get_args(DocumentPolicy):
        yield f"data.documents is {recipe.data.documents!r}; it must be 'across' or 'within'"
    if config.attention_kernel not in get_args(KernelName):
        yield (
            f"model.config.attention_kernel is {config.attention_kernel!r}; it is one of "
            f"{', '.join(get_args(KernelName))}"
        )
    yield from (
        f"model.config.{sentence}"
        for sentence in ignored_settings(fdl.ordered_arguments(config, include_defaults=True))
    )
    for name in (
        "rotary_base",
        "rotary_percent",
        "rotary_interleaved",
        "scale_factor",
        "position_embedding_type",
    ):
        if name in fdl.ordered_arguments(config):
            yield f"model.config.{name} has no effect; the rotation is model.config.rope"
    if "make_vocab_size_divisible_by" in fdl.ordered_arguments(config):
        yield (
            "model.config.make_vocab_size_divisible_by has no effect; the model pads a vocabulary "
            "that tensor parallelism does not divide"
        )
    for name in Recompute().megatron_settings():
        if name in fdl.ordered_arguments(config):
            yield f"model.config.{name} is overwritten by model.config.recompute; set that one"
    for name in ("cpu_offloading", "cpu_offloading_num_layers"):
        if getattr(config, name):
            yield (
                f"model.config.{name} is Megatron-Core's offload, which refuses recompute and PP; "
                "set model.config.offload"
            )
    yield from _without_effect_on_precision(recipe)
    yield from _without_effect_on_sharding(recipe)
    on_cpu = strategy.process_group_backend == "gloo"
    if config.attention_kernel != "auto":
        if (config.attention_kernel == "cpu_flash") != on_cpu:
            yield (
                f"model.config.attention_kernel is {config.attention_kernel}, which does not "
                f"compute on {'cpu' if on_cpu else 'cuda'}; take auto"
            )
        if config.cp.kind in TRANSFORMER_ENGINE_KINDS:
            yield (
                f"model.config.attention_kernel has no effect on model.config.cp.kind "
                f"{config.cp.kind}, which is Transformer Engine's; leave it at auto"
            )
    if "cp_comm_type" in fdl.ordered_arguments(config):
        yield "model.config.cp_comm_type has no effect; set model.config.cp.kind"
    if config.cp.kind in TRANSFORMER_ENGINE_KINDS and not config.transformer_engine:
        yield (
            f"model.config.cp.kind is {config.cp.kind}, which is Transformer Engine's, and this "
            "model runs without it; take ring, ulysses, head_chunked or hybrid"
        )
    if config.cp.kind in TRANSFORMER_ENGINE_KINDS and recipe.data.documents == "within":
        yield (
            f"model.config.cp.kind is {config.cp.kind}, which keeps documents apart only where "
            "they are padded; take ring, ulysses, head_chunked or hybrid, or data.documents=across"
        )
    for at, node in (("trainer.strategy", strategy), ("model.config", config)):
        given = fdl.ordered_arguments(node)
        for name in STAGES_OF_ANOTHER_KIND:
            if given.get(name):
                yield f"{at}.{name} is not supported; leave it out"
    chunks = strategy.virtual_pipeline_model_parallel_size
    if chunks is not None and chunks < 2:
        yield (
            f"trainer.strategy.virtual_pipeline_model_parallel_size is {chunks}; it is 2 or more, "
            "or null for a pipeline that is not interleaved"
        )
    elif chunks is not None and (not config.overlap_p2p_comm or config.batch_p2p_comm):
        yield (
            f"model.config.overlap_p2p_comm is {config.overlap_p2p_comm} and batch_p2p_comm "
            f"{config.batch_p2p_comm}; an interleaved pipeline takes True and False, since "
            "messages between two ranks in one batch can be taken for each other"
        )
    elif chunks is not None and config.deallocate_pipeline_outputs:
        yield (
            "model.config.deallocate_pipeline_outputs is True; an interleaved pipeline takes "
            "False, since outputs would be freed while they are being sent"
        )
    ends = [
        getattr(strategy, f"account_for_{end}_in_pipeline_split") for end in ("embedding", "loss")
    ]
    if ends[0] != ends[1]:
        yield (
            f"trainer.strategy.account_for_embedding_in_pipeline_split is {ends[0]} and "
            f"account_for_loss_in_pipeline_split {ends[1]}; set both, or neither"
        )
    if strategy.sequence_parallel != (strategy.tensor_model_parallel_size > 1):
        yield (
            f"trainer.strategy.sequence_parallel is {strategy.sequence_parallel} at tensor "
            f"parallel size {strategy.tensor_model_parallel_size}; it goes with tensor "
            "parallelism, so leave it out"
        )
    if strategy.process_group_backend == "nccl" and recipe.trainer.plugins.precision == "32":
        yield "trainer.plugins.precision is 32, which has no CUDA attention kernel; use bf16-mixed"
    if not any(hasattr(node, "tokens_per_batch") for node in recipe.trainer.callbacks):
        yield "trainer.callbacks has no StepLog, which checks what each step consumes; leave it in"


def _without_effect_on_precision(recipe: run.Partial) -> Iterator[str]:
    config, plugin = recipe.model.config, recipe.trainer.plugins
    for name in (
        "fp8",
        "fp8_recipe",
        "first_last_layers_bf16",
        "num_layers_at_start_in_bf16",
        "num_layers_at_end_in_bf16",
    ):
        if name in fdl.ordered_arguments(config):
            yield f"model.config.{name} is overwritten by trainer.plugins.{name}; set that one"
    for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
        if getattr(plugin, name):
            yield f"trainer.plugins.{name} has no effect; attention computes in bf16"
    if getattr(plugin, "fp4", None):
        yield f"trainer.plugins.fp4 is {plugin.fp4!r}, which is not supported; leave it out"


def _without_effect_on_sharding(recipe: run.Partial) -> Iterator[str]:
    strategy, optim = recipe.trainer.strategy, recipe.optim.config
    ddp = strategy.ddp
    if ddp.use_distributed_optimizer != optim.use_distributed_optimizer:
        yield (
            "trainer.strategy.ddp.use_distributed_optimizer is "
            f"{ddp.use_distributed_optimizer} and optim.config.use_distributed_optimizer "
            f"{optim.use_distributed_optimizer}; set both, or neither"
        )
    if strategy.fsdp is None:
        for name in ("use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy"):
            if name in fdl.ordered_arguments(ddp):
                yield (
                    f"trainer.strategy.ddp.{name} has no effect without trainer.strategy.fsdp; "
                    "set the layout's sharding"
                )
        if ddp.overlap_param_gather and not ddp.use_distributed_optimizer:
            yield (
                "trainer.strategy.ddp.overlap_param_gather has no effect without "
                "use_distributed_optimizer, which shards them; leave it out"
            )
    elif strategy.fsdp != "megatron" or (
        ddp.data_parallel_sharding_strategy not in MEGATRON_FSDP.values()
    ):
        yield (
            f"trainer.strategy.fsdp is {strategy.fsdp!r} with ddp.data_parallel_sharding_strategy "
            f"{ddp.data_parallel_sharding_strategy!r}; it is megatron, with "
            f"{' or '.join(MEGATRON_FSDP.values())}"
        )
    elif strategy.process_group_backend == "gloo":
        yield (
            f"trainer.strategy.fsdp is {strategy.fsdp!r} on cpu, where torch's Adam cannot save "
            "what Megatron FSDP shards; take sharding none or optimizer"
        )
    else:
        for path, needed in _FSDP_SETTINGS.items():
            value = functools.reduce(getattr, path.split("."), recipe)
            if value != needed:
                yield f"{path} is {value!r}, and Megatron FSDP takes {needed!r}; set it so"
    for name in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"):
        if getattr(optim, name) and not optim.optimizer_cpu_offload:
            yield (
                f"optim.config.{name} has no effect without optimizer_cpu_offload; set the "
                "layout's optimizer_offload"
            )
