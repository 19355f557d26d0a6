# SPDX-License-Identifier: Apache-2.0
"""Our nouns become NeMo's: the only place where a stage turns into `llm.pretrain`."""

import importlib
import math
from pathlib import Path

import fiddle as fdl
import nemo_run as run
from lightning.pytorch.loggers import TensorBoardLogger
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm

from custom_modules.callbacks.collective_timeout import CollectiveTimeout
from custom_modules.callbacks.hang_guard import HangGuard
from custom_modules.callbacks.loss_guard import LossGuard
from custom_modules.callbacks.step_log import StepLog
from custom_modules.callbacks.stop_in_time import StopInTime
from custom_modules.callbacks.stragglers import Stragglers
from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.memory.config import (
    Offload,
    Recompute,
    Tiling,
)
from custom_modules.rope.config import RopeScaling
from data.nemo_module import StoreDataModule
from recipes.nemo2.checkpoint_callback import StageCheckpoint, StageResume
from recipes.nemo2.lr_schedule import SCHEDULES
from recipes.nemo2.model import LongContextMixin, LongContextModel
from recipes.nemo2.strategy import CpuStrategy, LongContextStrategy
from recipes.nemo2.train_short import train_short
from recipes.planner.search import of_stage
from recipes.planner.timeouts import limits
from recipes.resolved.check import check
from recipes.resolved.ineffective import MEGATRON_FSDP
from recipes.spec import cluster
from recipes.spec.cluster import Cluster
from recipes.spec.families import Family
from recipes.spec.gate import Gate
from recipes.spec.layout import (
    Fp8,
    Layout,
    Sharding,
)
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import (
    recipe_name,
    run_folder,
    stage_folder,
    start_folder,
    store_folder,
)
from recipes.spec.stage import Ladder, Stage

CHECKPOINTS_PER_STAGE = 4
VALIDATIONS_PER_STAGE = 2
VALIDATION_BATCHES = 2
ON_CPU = {"first_seconds": 7200, "seconds": 3600}
"""When a CPU rank hangs; there is no plan of its step."""


def pretrain(
    card: ModelCard,
    ladder: Ladder,
    seq_length: int,
    layout: Layout,
    *,
    nodes: int = 1,
    machines: Cluster | None = None,
) -> run.Partial:
    """Return the recipe of one stage: `llm.pretrain` with everything it takes.

    The ranks are `layout.world_size`, spread evenly over `nodes`. From the step planned for
    `machines` (a DGX H100 where none are given) follows how long a collective may wait. Raises
    ValueError where card, stage, layout and nodes do not fit together.
    """
    stage = ladder[seq_length]
    recipe = run.Partial(
        llm.pretrain,
        model=run.Config(LongContextModel, config=model_config(card, stage, layout)),
        trainer=trainer(card, stage, layout, nodes=nodes, machines=machines),
        data=data_module(stage, layout),
        optim=optimizer(stage, layout),
        log=logger(stage),
        resume=run.Config(
            StageResume, resume_if_exists=True, resume_ignore_no_checkpoint=True, start=None
        ),
    )
    place(recipe, card, ladder, stage, run_to=run_folder(card, ladder), store=store_folder(card))
    shard(recipe, layout.sharding)
    if layout.optimizer_offload:
        offload_optimizer(recipe, layout.optimizer_offload)
    if layout.fp8.recipe != "none":
        compute_in_fp8(recipe, layout.fp8)
    if layout.device == "cpu":
        on_cpu(recipe)
    check(recipe)
    return recipe


def guards(
    card: ModelCard, stage: Stage, layout: Layout, machines: Cluster | None
) -> list[run.Config]:
    """Return the callbacks that stop a run in time, one that hangs and one whose loss breaks."""
    found = [
        run.Config(StopInTime),
        run.Config(LossGuard, path="", warmup_steps=stage.lr.warmup_steps(stage.steps)),
    ]
    if layout.device == "cpu":
        return [*found, run.Config(HangGuard, folder="", **ON_CPU)]
    machines = machines or cluster.load("dgx_h100")
    asked = of_stage(card, stage, machines, gpus=layout.world_size, fp8=layout.fp8)
    waits = limits(asked.plan(layout))
    first, between = _minutes(waits.first_heartbeat), _minutes(waits.heartbeat)
    return [
        *found,
        run.Config(HangGuard, folder="", first_seconds=first, seconds=between),
        run.Config(CollectiveTimeout, seconds=_minutes(waits.collective)),
        run.Config(Stragglers),
    ]


def _minutes(seconds: float) -> int:
    """Return seconds to the next ten minutes."""
    return math.ceil(seconds / 600) * 600


def model_config(card: ModelCard, stage: Stage, layout: Layout) -> run.Config:
    """Return NeMo's config with the shape of the card and the rotation of the stage."""
    rope = card.native_rope if stage.rope == "native" else stage.rope
    for name in ("partial_rotary_factor", "interleaved"):
        of_stage, of_card = getattr(rope, name), getattr(card.native_rope, name)
        if of_stage != of_card:
            raise ValueError(
                f"{name} of the stage's rotation is {of_stage} and {card.name}'s {of_card}; it is "
                "a fact of the model: set it alike"
            )
    if card.facts.experts and (layout.tiling.mlp or layout.fp8.recipe != "none"):
        raise ValueError(
            f"{card.name} has experts, which compute neither in tiles (the router's loss is of all "
            "tokens) nor in FP8; leave tiling mlp and fp8 out of the layout"
        )
    experts = {
        "num_moe_experts": card.experts,
        "moe_router_topk": card.experts_per_token,
        "moe_ffn_hidden_size": card.ffn_hidden,
    }
    return run.Config(
        config_class(card.facts),
        **(experts if card.facts.experts else {}),
        num_layers=card.layers,
        hidden_size=card.hidden,
        ffn_hidden_size=card.ffn_hidden,
        num_attention_heads=card.heads,
        num_query_groups=card.kv_heads,
        kv_channels=card.head_dim,
        vocab_size=card.vocab,
        share_embeddings_and_output_weights=card.tied_embeddings,
        layernorm_epsilon=card.norm_epsilon,
        init_method_std=card.init_std,
        seq_length=stage.seq_length,
        rope=described(rope),
        cp=described(layout.cp.how),
        attention_kernel="auto",
        recompute=described(layout.recompute),
        tiling=described(layout.tiling),
        offload=described(layout.offload),
        transformer_engine=True,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
    )


def config_class(family: Family) -> type[LongContextMixin]:
    """Return the class of a family's configs."""
    module, _, name = family.config_class.rpartition(".")
    found: type[LongContextMixin] = getattr(importlib.import_module(module), name)
    return found


def described(
    noun: RopeScaling | ContextParallelKind | Recompute | Tiling | Offload | Gate,
) -> run.Config:
    """Return a description as a node of the tree, so that an override reaches its fields.

    A tuple becomes a list, the only sequence that YAML and nemo-run's overrides have. A rotation
    that stretches another holds that as a node of its own.
    """
    fields = {name: getattr(noun, name) for name in type(noun).__dataclass_fields__}
    if isinstance(noun, RopeScaling) and noun.before is not None:
        fields["before"] = described(noun.before)
    lists = {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
    return run.Config(type(noun), **fields | lists)


def trainer(
    card: ModelCard,
    stage: Stage,
    layout: Layout,
    *,
    nodes: int,
    machines: Cluster | None = None,
) -> run.Config:
    """Return the trainer: steps, ranks, precision, our step log for its progress, and guards."""
    if layout.world_size % nodes:
        raise ValueError(
            f"the layout has {layout.world_size} ranks, which do not divide evenly over "
            f"{nodes} nodes"
        )
    strategy = run.Config(
        LongContextStrategy,
        process_group_backend="nccl",
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        context_parallel_size=layout.cp.size,
        pipeline_model_parallel_size=layout.pp,
        ddp=run.Config(
            DistributedDataParallelConfig,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            average_in_collective=False,  # gradients are sums; the tokens divide them once
            check_for_nan_in_grad=False,  # it ends a run that LossGuard could rewind
        ),
        ckpt_async_save=True,
        ckpt_parallel_load=True,
        ckpt_optim_fully_reshardable=True,
        replace_progress_bar=False,  # NeMo's printer hangs gloo: a world all-gather on rank 0 alone
    )
    step_log = run.Config(
        StepLog,
        tokens_per_batch=stage.tokens_per_batch,
        seq_length=stage.seq_length,
        flops_per_token=float(card.flops_per_token(stage.seq_length)),
    )
    return run.Config(
        nl.Trainer,
        accelerator="gpu",
        devices=layout.world_size // nodes,
        num_nodes=nodes,
        max_steps=stage.steps,
        strategy=strategy,
        plugins=run.Config(
            nl.MegatronMixedPrecision,
            precision="bf16-mixed" if layout.precision == "bf16" else "32",
            grad_reduce_in_fp32=True,
        ),
        callbacks=[step_log, *guards(card, stage, layout, machines)],
        val_check_interval=max(1, stage.steps // VALIDATIONS_PER_STAGE),
        limit_val_batches=VALIDATION_BATCHES,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        accumulate_grad_batches=1,  # micro-batches are Megatron's
        use_distributed_sampler=False,  # the sampler is Megatron's
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def data_module(stage: Stage, layout: Layout) -> run.Config:
    """Return the data module over the store, batches counted in sequences."""
    return run.Config(
        StoreDataModule,
        seq_length=stage.seq_length,
        micro_batch_size=layout.micro_batch,
        global_batch_size=stage.sequences_per_batch,
        documents=stage.documents,
        num_workers=2,
        pin_memory=True,
        **train_short(stage),
    )


def optimizer(stage: Stage, layout: Layout) -> run.Config:
    """Return Adam with the stage's own rate, warmed up and annealed within the stage."""
    return run.Config(
        nl.MegatronOptimizerModule,
        config=run.Config(
            OptimizerConfig,
            optimizer="adam",
            lr=stage.lr.peak,
            weight_decay=stage.weight_decay,
            adam_beta1=0.9,
            adam_beta2=stage.adam_beta2,
            adam_eps=1e-8,
            clip_grad=1.0,
            bf16=layout.precision == "bf16",
        ),
        lr_scheduler=run.Config(
            SCHEDULES[type(stage.lr)],
            max_steps=stage.steps,
            warmup_ratio=stage.lr.warmup_ratio,
            final_ratio=stage.lr.final_ratio,
        ),
    )


def logger(stage: Stage) -> run.Config:
    """Return NeMo's logger with our checkpoints and TensorBoard."""
    return run.Config(
        nl.NeMoLogger,
        use_datetime_version=False,  # ranks name it by their own clocks
        update_logger_directory=False,
        ckpt=run.Config(
            StageCheckpoint,
            filename="{step}",
            enable_version_counter=False,  # a name is its step; a second version would never end
            every_n_train_steps=max(1, stage.steps // CHECKPOINTS_PER_STAGE),
            save_optim_on_train_end=True,
            verbose=False,
        ),
        tensorboard=run.Config(TensorBoardLogger, name="tensorboard", version="events"),
    )


def place(
    recipe: run.Partial, card: ModelCard, ladder: Ladder, stage: Stage, *, run_to: Path, store: Path
) -> None:
    """Set every path of the recipe: what it writes under `run_to`, what it reads."""
    folder = stage_folder(run_to, recipe_name(card, ladder, stage))
    start = start_folder(card, ladder, stage, run_to)
    recipe.data.store = str(store)
    recipe.trainer.callbacks[0].path = str(folder / "metrics.jsonl")
    for guard in recipe.trainer.callbacks[1:]:
        if isinstance(guard, run.Config) and guard.__fn_or_cls__ is LossGuard:
            guard.path = str(folder / "rewinds.jsonl")
        elif isinstance(guard, run.Config) and guard.__fn_or_cls__ is HangGuard:
            guard.folder = str(folder / "stacks")
    recipe.log.name = folder.name
    recipe.log.explicit_log_dir = str(folder / "logs")
    recipe.log.ckpt.dirpath = str(folder / "checkpoints")
    recipe.log.tensorboard.save_dir = str(folder)
    recipe.resume.resume_from_directory = str(folder / "checkpoints")
    recipe.resume.start = None if start is None else str(start)


def shard(recipe: run.Partial, sharding: Sharding) -> None:
    """Set what each of the ranks that share parameters has a part of."""
    strategy, distributed = recipe.trainer.strategy, sharding != "none"
    strategy.ddp.use_distributed_optimizer = distributed
    strategy.ddp.overlap_param_gather = distributed  # else every rank has them all
    recipe.optim.config.use_distributed_optimizer = distributed
    if sharding in MEGATRON_FSDP:
        strategy.fsdp = "megatron"
        strategy.ddp.use_megatron_fsdp = True
        strategy.ddp.data_parallel_sharding_strategy = MEGATRON_FSDP[sharding]
        strategy.save_ckpt_format = "fsdp_dtensor"
        strategy.ckpt_async_save = False  # NeMo writes this format synchronously
        recipe.model.config.gradient_accumulation_fusion = False  # FSDP owns the gradients


def offload_optimizer(recipe: run.Partial, fraction: float) -> None:
    """Leave a fraction of the optimizer's state and step to the CPU, or none."""
    config, offloads = recipe.optim.config, fraction != 0
    config.optimizer_cpu_offload = offloads
    config.optimizer_offload_fraction = fraction
    config.overlap_cpu_optimizer_d2h_h2d = offloads
    config.use_precision_aware_optimizer = offloads  # else fp32 weights stay on the GPU as well


def compute_in_fp8(recipe: run.Partial, fp8: Fp8) -> None:
    """Set NeMo's precision plugin, which overwrites the model's FP8 fields, to a recipe."""
    plugin = recipe.trainer.plugins
    # The formats of Transformer Engine's own recipes: a block's scale leaves gradients in range.
    plugin.fp8 = "e4m3" if fp8.recipe in ("blockwise", "mxfp8") else "hybrid"
    plugin.fp8_recipe = fp8.recipe
    plugin.first_last_layers_bf16 = bool(fp8.bf16_first or fp8.bf16_last)
    plugin.num_layers_at_start_in_bf16 = fp8.bf16_first
    plugin.num_layers_at_end_in_bf16 = fp8.bf16_last
    if fp8.recipe == "delayed":
        plugin.fp8_amax_history_len = 1024  # as NeMo's own recipe of delayed scaling
        plugin.fp8_amax_compute_algo = "max"


def on_cpu(recipe: run.Partial) -> None:
    """Turn a recipe for GPUs into one for CPU ranks under gloo; the numbers stay the same."""
    strategy = recipe.trainer.strategy
    fdl.update_callable(strategy, CpuStrategy)
    strategy.process_group_backend = "gloo"
    strategy.ckpt_async_save = False  # there is no device to copy from meanwhile
    strategy.ddp.overlap_grad_reduce = False
    strategy.ddp.overlap_param_gather = False
    if recipe.optim.config.optimizer_cpu_offload:
        offload_optimizer(recipe, 0.0)  # it is there already
    recipe.trainer.accelerator = "cpu"
    kept = [one for one in recipe.trainer.callbacks if one.__fn_or_cls__ is not Stragglers]
    recipe.trainer.callbacks = kept
    recipe.data.num_workers = 0
    recipe.data.pin_memory = False
    plain_kernels(recipe.model.config)


def plain_kernels(config: run.Config) -> None:
    """Set a model config to the kernels that CPU has; they compute what the fused ones do."""
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
