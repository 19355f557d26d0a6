# SPDX-License-Identifier: Apache-2.0
"""A stage as Megatron-Bridge 0.6 configures it: the tree of its `ConfigContainer`; light.

The tree is plain data with Bridge's `_target_` keys. Bridge builds it once this package's modules
are allowed as targets:

    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix

    register_allowed_target_prefix("custom_modules.")
    container = ConfigContainer.from_yaml("llama3_8b_nemo_16k.yaml")

Bridge's `GPTModelProvider` builds a plain Megatron-Core GPT over `long_context_spec`: attention,
context parallelism, recompute, offload and the tiled MLP are this package's, and rotation and loss
are Megatron-Core's. `refusals` says which stages would train something else that way, `left_out`
what a stage trains without there.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.memory.config import Offload, Recompute, Tiling
from custom_modules.rope.config import RopeScaling
from recipes.planner.goodput import LEAST_CHECKPOINTS
from recipes.spec import pipeline
from recipes.spec.layout import Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import recipe_name, run_folder, stage_folder, start_folder, store_folder
from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.train_short import Positions

RELEASE = "0.6.2"
"""The release of Megatron-Bridge whose fields these are."""
TRAINING = "megatron.bridge.training.config"
_LLAMA3 = {"original_length": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""What Megatron-Core's llama3 scaling states in its code; only the factor is a field."""
_ACTIVATIONS = {
    "silu": "torch.nn.functional.silu",
    "relu2": "megatron.core.activations.squared_relu",
}
VALIDATIONS_PER_STAGE, VALIDATION_BATCHES = 2, 2


def text(card: ModelCard, ladder: Ladder, seq_length: int, layout: Layout) -> str:
    """Return the tree as YAML, after a comment of what the stage has here and not in Bridge."""
    stage = ladder[seq_length]
    name = recipe_name(card, ladder, stage)
    head = [
        f"{name} for Megatron-Bridge {RELEASE}: docs/megatron_bridge.md",
        *(f"Not in it: {what}." for what in left_out(stage, layout)),
    ]
    tree = container(card, ladder, seq_length, layout)
    return "".join(f"# {line}\n" for line in head) + yaml.safe_dump(tree, sort_keys=False)


def container(card: ModelCard, ladder: Ladder, seq_length: int, layout: Layout) -> dict[str, Any]:
    """Return the tree of one stage; raise ValueError if Bridge would train something else."""
    stage = ladder[seq_length]
    name = recipe_name(card, ladder, stage)
    for why in refusals(card, stage, layout):
        raise ValueError(f"{name} as a configuration of Megatron-Bridge: {why}")
    run = run_folder(card, ladder)
    folder = stage_folder(run, name)
    start = start_folder(card, ladder, stage, run)
    return {
        "_target_": f"{TRAINING}.ConfigContainer",
        "model": _model(card, stage, layout),
        "train": _of(
            "TrainingConfig",
            micro_batch_size=layout.micro_batch,
            global_batch_size=stage.sequences_per_batch,
            train_iters=stage.steps,
        ),
        "validation": {
            "_target_": "megatron.training.config.ValidationConfig",
            "eval_interval": max(1, stage.steps // VALIDATIONS_PER_STAGE),
            "eval_iters": VALIDATION_BATCHES,
        },
        "optimizer": _of("OptimizerConfig", **_optimizer(stage, layout)),
        "scheduler": _of("SchedulerConfig", **_schedule(stage)),
        "ddp": _of("DistributedDataParallelConfig", **_ddp(layout)),
        "dataset": _of(
            "GPTDatasetConfig",
            seq_length=stage.seq_length,
            data_path=str(store_folder(card) / "megatron"),
            random_seed=1234,
            split="99,1,0",
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            num_workers=2,
        ),
        "tokenizer": {
            "_target_": "megatron.bridge.training.tokenizers.config.TokenizerConfig",
            "tokenizer_type": "HuggingFaceTokenizer" if card.hf_id else "NullTokenizer",
            **({"tokenizer_model": card.hf_id} if card.hf_id else {"vocab_size": card.vocab}),
        },
        "logger": _of("LoggerConfig", log_interval=1, tensorboard_dir=str(folder / "tensorboard")),
        "checkpoint": _of("CheckpointConfig", **_checkpoint(stage, folder, start)),
        "dist": _of(
            "DistributedInitConfig",
            distributed_backend="gloo" if layout.device == "cpu" else "nccl",
        ),
        "mixed_precision": "bf16_mixed" if layout.precision == "bf16" else None,
    }


def refusals(card: ModelCard, stage: Stage, layout: Layout) -> Iterator[str]:
    """Yield why Bridge would train something else than the recipe, a clause each."""
    if card.facts.patterned:
        kinds = f" ({card.pattern.describe()})" if card.pattern else ""
        yield (
            f"layers of family {card.family} differ{kinds}, and Bridge's plain GPT has layers and "
            "norms as Llama's; take a card of another family"
        )
    if (why := _not_rotated(_rotation(card, stage))) is not None:
        yield why
    if card.facts.experts:
        yield f"family {card.family} has experts, and only dense models are exported"
    if stage.documents == "within":
        yield (
            "documents are kept apart, and Bridge's dataset has no table of them for this "
            "attention; take a stage with documents across"
        )
    if stage.positions != Positions():
        yield "positions of its samples are drawn, and Bridge's dataset has consecutive ones"
    if stage.mix is not None:
        yield "it has a mix of sources, and Bridge's blend draws sequences, not documents"
    if layout.sharding not in ("none", "optimizer"):
        yield f"sharding {layout.sharding} is Megatron FSDP's; take optimizer or none"
    if stage.optimizer == "carried":
        yield "its optimizer is carried over, and Bridge starts from weights with a new one"
    if layout.fp8.recipe != "none":
        yield f"fp8 {layout.fp8.recipe} is not exported; take a layout in bf16"
    if layout.optimizer_offload:
        yield "optimizer_offload is not exported; take a layout without it"
    if card.vocab % layout.tp:
        yield (
            f"vocab {card.vocab:,} is not a multiple of tp {layout.tp}, and a plain GPT counts "
            "the padding in its loss"
        )


def left_out(stage: Stage, layout: Layout) -> Iterator[str]:
    """Yield what the stage has here and not in Bridge; none of it changes what is computed."""
    yield (
        "the store, which has this project's format: write its documents as Megatron-Core's .bin "
        "and .idx to the data_path"
    )
    yield "guards of loss, time and hangs, the step log and the gate: Bridge has its own logger"
    yield "the verified, atomic checkpoints: Bridge writes Megatron-Core's"
    if layout.tiling.loss:
        yield (
            f"the loss in tiles of {layout.tiling.loss_tile:,} tokens: Megatron-Core forms the "
            "logits of the whole sequence"
        )
    if stage.start == "card":
        yield (
            "the import of the weights: set checkpoint.pretrained_checkpoint to what Bridge's "
            "AutoBridge has imported"
        )


def _of(name: str, **fields: Any) -> dict[str, Any]:
    return {"_target_": f"{TRAINING}.{name}", **fields}


def _function(name: str) -> dict[str, Any]:
    """Return a node that Bridge resolves to the object of a dotted name, uncalled."""
    return {"_target_": name, "_call_": False}


def _rotation(card: ModelCard, stage: Stage) -> RopeScaling:
    return card.native_rope if stage.rope == "native" else stage.rope


def _not_rotated(rope: RopeScaling) -> str | None:
    """Return why Megatron-Core's own embedding does not rotate so, or None if it does."""
    if rope.before is not None or rope.method not in ("default", "linear", "llama3"):
        return (
            f"rotation {rope.method} is not Megatron-Core's own under this attention; default, "
            "linear and llama3 are"
        )
    if rope.base != int(rope.base):
        return f"base {rope.base} is not a whole number, as Bridge's rotary_base is"
    if rope.method == "llama3":
        for name, fixed in _LLAMA3.items():
            if getattr(rope, name) != fixed:
                return f"{name} is {getattr(rope, name)}; Megatron-Core's llama3 has {fixed}"
    return None


def _model(card: ModelCard, stage: Stage, layout: Layout) -> dict[str, Any]:
    family, rope = card.facts, _rotation(card, stage)
    bf16 = layout.precision == "bf16"
    dtype = "torch.bfloat16" if bf16 else "torch.float32"
    virtual: dict[str, int] = {}
    if layout.vpp > 1:
        virtual["virtual_pipeline_model_parallel_size"] = layout.vpp
    if pipeline.is_uneven(card.layers, layout.pp, layout.vpp):
        virtual["account_for_embedding_in_pipeline_split"] = True
        virtual["account_for_loss_in_pipeline_split"] = True
    return {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        "num_layers": card.layers,
        "hidden_size": card.hidden,
        "ffn_hidden_size": card.ffn_hidden,
        "num_attention_heads": card.heads,
        "num_query_groups": card.kv_heads,
        "kv_channels": card.head_dim,
        "vocab_size": card.vocab,
        "share_embeddings_and_output_weights": card.tied_embeddings,
        "layernorm_epsilon": card.norm_epsilon,
        "init_method_std": card.init_std,
        "normalization": family.normalization,
        "layernorm_zero_centered_gamma": family.zero_centered,
        "gated_linear_unit": family.gated,
        "activation_func": _function(_ACTIVATIONS[family.activation]),
        "add_bias_linear": False,
        "add_qkv_bias": family.qkv_bias,
        "qk_layernorm": family.qk_norm,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "seq_length": stage.seq_length,
        **_rotary(rope),
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.tp > 1,
        "context_parallel_size": layout.cp.size,
        "pipeline_model_parallel_size": layout.pp,
        **virtual,
        "params_dtype": _function(dtype),
        "pipeline_dtype": _function(dtype),
        "bf16": bf16,
        "calculate_per_token_loss": True,
        "apply_rope_fusion": False,
        "cross_entropy_loss_fusion": False,
        **({} if layout.device == "cuda" else _CPU),
        "transformer_layer_spec": {
            "_target_": "custom_modules.gpt.model.long_context_spec",
            "_partial_": True,
            "cp": _noun(layout.cp.how),
            "seq_length": stage.seq_length,
            "transformer_engine": layout.device == "cuda",
            "recompute": _noun(layout.recompute),
            "tiling": _noun(layout.tiling),
            "offload": _noun(layout.offload),
        },
    }


_CPU = {
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
}
"""Fields of the model on ranks without a GPU, where Transformer Engine and fusions are missing."""


def _noun(noun: ContextParallelKind | Recompute | Tiling | Offload) -> dict[str, Any]:
    kind = type(noun)
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **asdict(noun)}


def _rotary(rope: RopeScaling) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": int(rope.base),
        "rotary_percent": rope.partial_rotary_factor,
        "rotary_interleaved": rope.interleaved,
    }
    if rope.method == "llama3":
        fields |= {"rope_scaling": True, "rope_scaling_factor": rope.factor}
    if rope.method == "linear":
        fields["seq_len_interpolation_factor"] = rope.factor
    return fields


def _optimizer(stage: Stage, layout: Layout) -> dict[str, Any]:
    return {
        "optimizer": "adam",
        "lr": stage.lr.peak,
        "min_lr": stage.lr.peak * stage.lr.final_ratio,
        "weight_decay": stage.weight_decay,
        "adam_beta1": 0.9,
        "adam_beta2": stage.adam_beta2,
        "adam_eps": 1e-8,
        "clip_grad": 1.0,
        "bf16": layout.precision == "bf16",
        "use_distributed_optimizer": layout.sharding == "optimizer",
    }


def _schedule(stage: Stage) -> dict[str, Any]:
    return {
        "lr_decay_style": "cosine" if isinstance(stage.lr, Cosine) else "linear",
        "lr_decay_iters": stage.steps,
        "lr_warmup_iters": stage.lr.warmup_steps(stage.steps),
        "start_weight_decay": stage.weight_decay,
        "end_weight_decay": stage.weight_decay,
        "weight_decay_incr_style": "constant",
    }


def _ddp(layout: Layout) -> dict[str, Any]:
    distributed = layout.sharding == "optimizer"
    return {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": distributed,
        "use_distributed_optimizer": distributed,
        "average_in_collective": False,
        "check_for_nan_in_grad": True,
    }


def _checkpoint(stage: Stage, folder: Path, start: Path | None) -> dict[str, Any]:
    """Return the fields of saves, and of the weights that the stage starts from.

    Weights of a card are imported by Bridge: its validation refuses a folder that is not there.
    """
    checkpoints = str(folder / "checkpoints")
    before = None if start is None or stage.start == "card" else str(start)
    return {
        "save": checkpoints,
        "load": checkpoints,
        "save_interval": max(1, stage.steps // LEAST_CHECKPOINTS),
        "pretrained_checkpoint": before,
        "ckpt_format": "torch_dist",
        "fully_parallel_save": True,
        "fully_parallel_load": True,
        "async_save": False,
        "dist_ckpt_optim_fully_reshardable": True,
    }
