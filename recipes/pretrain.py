# SPDX-License-Identifier: Apache-2.0
"""Build NeMo's `llm.pretrain` from a model card, a stage and a layout."""

import importlib
from typing import TypeAlias

import nemo_run as run
from lightning.pytorch.loggers import TensorBoardLogger
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm

from custom_modules.callbacks.step_log import StepLog
from data.nemo_module import StoreDataModule
from recipes.nemo2.checkpoint_callback import StageCheckpoint, StageResume
from recipes.nemo2.cpu import on_cpu
from recipes.nemo2.guards import guards
from recipes.nemo2.lr_schedule import SCHEDULES
from recipes.nemo2.model import LongContextMixin, LongContextModel
from recipes.nemo2.settings import (
    as_config_node,
    compute_in_fp8,
    mix_node,
    offload_optimizer,
    place,
    shard,
)
from recipes.nemo2.strategy import LongContextStrategy
from recipes.nemo2.train_short import train_short
from recipes.planner.goodput import LEAST_CHECKPOINTS, goodput
from recipes.planner.plan import Plan
from recipes.planner.search.request import of_stage
from recipes.resolved.check import check
from recipes.spec import cluster, pipeline
from recipes.spec.cluster import Cluster
from recipes.spec.families import Family
from recipes.spec.layout import Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import run_folder, store_folder
from recipes.spec.stage import Ladder, Stage

VALIDATIONS_PER_STAGE = 2
VALIDATION_BATCHES = 2

PretrainRecipe: TypeAlias = run.Partial
"""A recipe: nemo-run's description of a call of `llm.pretrain`."""


def pretrain(
    card: ModelCard,
    ladder: Ladder,
    seq_length: int,
    layout: Layout,
    *,
    nodes: int = 1,
    machines: Cluster | None = None,
) -> PretrainRecipe:
    """Return the recipe of one stage: `llm.pretrain` with all its arguments.

    The ranks are `layout.world_size`, spread evenly over `nodes`. Timeouts and the checkpoint
    interval follow from the step time planned for `machines` (by default a DGX H100). Raises
    ValueError if card, stage, layout and nodes do not fit together.
    """
    stage = ladder[seq_length]
    planned = _planned(card, stage, layout, machines)
    recipe = run.Partial(
        llm.pretrain,
        model=run.Config(LongContextModel, config=model_config(card, stage, layout)),
        trainer=trainer(card, stage, layout, nodes=nodes, planned=planned),
        data=data_module(card, stage, layout),
        optim=optimizer(stage, layout),
        log=logger(stage, planned),
        resume=run.Config(
            StageResume,
            resume_if_exists=True,
            resume_ignore_no_checkpoint=True,
            start=None,
            **({"optimizer": "carried"} if stage.optimizer == "carried" else {}),
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


def model_config(card: ModelCard, stage: Stage, layout: Layout) -> run.Config:
    """Return NeMo's config with the shape of the card and the rotation of the stage."""
    rope = card.native_rope if stage.rope == "native" else stage.rope
    for name in ("partial_rotary_factor", "interleaved"):
        of_stage, of_card = getattr(rope, name), getattr(card.native_rope, name)
        if of_stage != of_card:
            raise ValueError(
                f"{name} of the stage's rotation is {of_stage} and {card.name}'s {of_card}; it is "
                "a fact of the model: set both to the same value"
            )
    experts = {
        "num_moe_experts": card.experts,
        "moe_router_topk": card.experts_per_token,
        "moe_ffn_hidden_size": card.ffn_hidden,
    }
    # In one batch the two messages between neighbours, which of two ranks are the same pair, could
    # be taken for each other. Messages go on while the next chunk is computed, so the memory of an
    # output has to stay: neither gloo nor NCCL keeps it once Megatron-Core has replaced its data.
    interleaved = {
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
        "deallocate_pipeline_outputs": False,
    }
    return run.Config(
        config_class(card.facts),
        **(experts if card.facts.experts else {}),
        **(interleaved if layout.vpp > 1 else {}),
        **({} if card.pattern is None else {"pattern": as_config_node(card.pattern)}),
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
        rope=as_config_node(rope),
        cp=as_config_node(layout.cp.how),
        attention_kernel="auto",
        recompute=as_config_node(layout.recompute),
        tiling=as_config_node(layout.tiling),
        offload=as_config_node(layout.offload),
        transformer_engine=True,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
    )


def config_class(family: Family) -> type[LongContextMixin]:
    """Return the class of a family's configs."""
    module, _, name = family.config_class.rpartition(".")
    found: type[LongContextMixin] = getattr(importlib.import_module(module), name)
    return found


def trainer(
    card: ModelCard,
    stage: Stage,
    layout: Layout,
    *,
    nodes: int,
    planned: Plan | None = None,
) -> run.Config:
    """Return the trainer: steps, ranks, precision, step log in place of a progress bar, guards."""
    if layout.world_size % nodes:
        raise ValueError(
            f"the layout has {layout.world_size} ranks, which do not divide evenly over "
            f"{nodes} nodes"
        )
    some: dict[str, int | bool] = {}
    if layout.ep > 1:
        some["expert_model_parallel_size"] = layout.ep
    if layout.etp is not None:
        some["expert_tensor_parallel_size"] = layout.etp
    if layout.vpp > 1:
        some["virtual_pipeline_model_parallel_size"] = layout.vpp
    if pipeline.is_uneven(card.layers, layout.pp, layout.vpp):
        some["account_for_embedding_in_pipeline_split"] = True
        some["account_for_loss_in_pipeline_split"] = True
    strategy = run.Config(
        LongContextStrategy,
        process_group_backend="nccl",
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        context_parallel_size=layout.cp.size,
        pipeline_model_parallel_size=layout.pp,
        **some,
        ddp=run.Config(
            DistributedDataParallelConfig,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            average_in_collective=False,  # gradients are sums; the tokens divide them once
            check_for_nan_in_grad=False,  # it would end a run that LossGuard can rewind
        ),
        ckpt_async_save=True,
        ckpt_parallel_load=True,
        ckpt_optim_fully_reshardable=True,
        replace_progress_bar=False,  # NeMo's printer hangs gloo: a world all-gather on rank 0 alone
    )
    peak: dict[str, str | float] = {}
    if planned is not None:
        gpu = planned.cluster.gpu
        peak = {"gpu": gpu.name, "peak_flops": gpu.bf16_tflops * 1e12}
    step_log = run.Config(
        StepLog,
        tokens_per_batch=stage.tokens_per_batch,
        seq_length=stage.seq_length,
        flops_per_token=float(card.flops_per_token(stage.seq_length)),
        **peak,
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
        callbacks=[step_log, *guards(stage, planned)],
        val_check_interval=max(1, stage.steps // VALIDATIONS_PER_STAGE),
        limit_val_batches=VALIDATION_BATCHES,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        accumulate_grad_batches=1,  # micro-batches are Megatron's
        use_distributed_sampler=False,  # the sampler is Megatron's
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def data_module(card: ModelCard, stage: Stage, layout: Layout) -> run.Config:
    """Return the data module of the store, with batch sizes in sequences."""
    window = None if card.pattern is None else card.pattern.window
    return run.Config(
        StoreDataModule,
        seq_length=stage.seq_length,
        micro_batch_size=layout.micro_batch,
        global_batch_size=stage.sequences_per_batch,
        documents=stage.documents,
        num_workers=2,
        pin_memory=True,
        **({} if stage.mix is None else {"mix": mix_node(stage.mix)}),
        **({} if stage.recovers is None else {"recovers": stage.recovers}),
        **({} if window is None else {"window": window}),
        **train_short(stage),
    )


def optimizer(stage: Stage, layout: Layout) -> run.Config:
    """Return Adam with the learning rate schedule of the stage."""
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


def _planned(
    card: ModelCard, stage: Stage, layout: Layout, machines: Cluster | None
) -> Plan | None:
    """Return the plan of a stage on its machines; None for CPU ranks."""
    if layout.device == "cpu":
        return None
    machines = machines or cluster.load(cluster.CLUSTER)
    asked = of_stage(card, stage, machines, gpus=layout.world_size, fp8=layout.fp8)
    return asked.plan(layout)


def logger(stage: Stage, planned: Plan | None = None) -> run.Config:
    """Return NeMo's logger with our checkpoints and TensorBoard.

    A stage saves at least four times, and on GPUs as often as failures of their nodes make worth
    while (`recipes.planner.goodput`).
    """
    every = max(1, stage.steps // LEAST_CHECKPOINTS)
    if planned is not None:
        every = goodput(planned, stage.steps).every
    return run.Config(
        nl.NeMoLogger,
        use_datetime_version=False,  # each rank would use its own clock
        update_logger_directory=False,
        ckpt=run.Config(
            StageCheckpoint,
            filename="{step}",
            enable_version_counter=False,  # a name is its step; a second version would never end
            every_n_train_steps=every,
            save_optim_on_train_end=True,
            verbose=False,
        ),
        tensorboard=run.Config(TensorBoardLogger, name="tensorboard", version="events"),
    )
