# SPDX-License-Identifier: Apache-2.0
"""One training of a small Llama on a CPU rank, as NeMo's own recipe and as ours.

Both take the same shape, tokens, schedule, Adam, and initial weights (the same seed draws them in
the same order). NeMo's has NeMo's model, strategy, data module, logger and checkpoint callback, and
the callbacks and logging intervals of its `llama3_8b` recipe. What differs from that recipe:

* no Transformer Engine and no fused operators of a GPU, as in our recipes on CPU;
* the strategy is inside `custom_modules.cpu.backend`, without which it needs CUDA;
* its dataset takes no token for padding, as ours (`data.nemo_module`): else ends of documents are
  masked, and the two train on other labels;
* gradients are divided by the tokens of the batch (`calculate_per_token_loss`), as in our recipes;
* `check_for_nan_in_grad` is off, as in our recipes, and the data loader has no worker processes.

Without Transformer Engine NeMo's attention is Megatron-Core's, which forms the scores [b, h, S, S]
and reads a mask of [S, S]. With `torch_attention` it is PyTorch's operator, which on a CPU calls
the kernel that ours calls; then nothing but the code around that kernel is compared.

Validation and checkpoints are part of neither: their first would come after the last step.
"""

from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import fiddle as fdl
import nemo_run as run
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.common.tokenizers import AutoTokenizer
from nemo.collections.llm.gpt.model.llama import LlamaConfig, LlamaModel
from nemo.collections.llm.recipes.log.default import default_log, default_resume, tensorboard_logger
from nemo.lightning.pytorch.optim.lr_scheduler import CosineAnnealingScheduler
from nemo.utils.exp_manager import TimingCallback
from torch import Tensor, nn

from custom_modules.cpu.backend import cpu_backend
from custom_modules.memory.config import KEEP_ALL, UNTILED, Recompute, Tiling
from data.nemo_module import NO_TOKEN
from data.store import Manifest
from recipes.nemo2.settings import place
from recipes.pretrain import optimizer as our_optimizer
from recipes.pretrain import pretrain
from recipes.spec.layout import Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.stage import Ladder, Stage


class TorchAttention(nn.Module):
    """Causal core attention by PyTorch's operator: q [s, b, h, D], k, v [s, b, g, D]."""

    def __init__(self, **megatron: Any) -> None:
        """Take Megatron-Core's arguments of core attention, which it does not need."""
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **megatron: Any
    ) -> Tensor:
        """Return attention [s, b, h * D]."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def torch_attention_spec(config: LlamaConfig) -> ModuleSpec:
    """Return NeMo's layer without Transformer Engine, with PyTorch's attention."""
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    spec.submodules.self_attention.submodules.core_attention = TorchAttention
    return spec


def forward_without_mask(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Run NeMo's forward step as it runs with Transformer Engine: without a mask."""
    return model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=None,
        labels=batch["labels"],
    )


class UnpaddedDataset(GPTDataset):
    """Megatron's dataset, for data in which no token is padding."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what Megatron's dataset takes."""
        super().__init__(*args, **kwargs)
        self._pad_token_id = NO_TOKEN


class UnmaskedDataModule(llm.PreTrainingDataModule):
    """NeMo's data module as it is with Transformer Engine: without a mask [S, S] a sample."""

    def __init__(self, **nemo: Any) -> None:
        """Take NeMo's arguments."""
        super().__init__(**nemo)
        self.create_attention_mask = False


class NemoOnCpu(nl.MegatronStrategy):
    """NeMo's strategy inside `cpu_backend()`, without which it needs CUDA."""

    def setup_environment(self) -> None:
        """Enter the CPU backend, then set up ranks and groups."""
        self._backend = ExitStack()
        self._backend.enter_context(cpu_backend(force=True))
        super().setup_environment()

    def teardown(self) -> None:
        """Tear down, then leave the CPU backend."""
        super().teardown()
        self._backend.close()


def nemo(
    card: ModelCard,
    stage: Stage,
    *,
    store: Path,
    folder: Path,
    torch_attention: bool = True,
    full_recompute: bool = False,
) -> partial[Any]:
    """Return the call of `llm.pretrain` of NeMo's own recipe, which writes into `folder`.

    `full_recompute` is Megatron-Core's, of every layer.
    """
    config = run.Config(
        LlamaConfig,
        num_layers=card.layers,
        hidden_size=card.hidden,
        ffn_hidden_size=card.ffn_hidden,
        num_attention_heads=card.heads,
        num_query_groups=card.kv_heads,
        kv_channels=card.head_dim,
        vocab_size=card.vocab,
        seq_length=stage.seq_length,
        rotary_base=card.native_rope.base,
        init_method_std=card.init_std,
        layernorm_epsilon=card.norm_epsilon,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        cross_entropy_loss_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    if torch_attention:
        config.transformer_layer_spec = torch_attention_spec
        config.forward_step_fn = forward_without_mask
    if full_recompute:
        config.recompute_granularity = "full"
        config.recompute_method = "uniform"
        config.recompute_num_layers = 1
    recipe = run.Partial(
        llm.pretrain,
        model=run.Config(LlamaModel, config=config),
        trainer=_trainer(stage),
        data=_data(stage, store, masked=not torch_attention),
        optim=_optimizer(stage),
        log=_log(folder),
        resume=default_resume(),
    )
    return fdl.build(recipe)


def _trainer(stage: Stage) -> run.Config:
    ddp = run.Config(
        DistributedDataParallelConfig,
        grad_reduce_in_fp32=True,
        average_in_collective=False,  # gradients are sums; the tokens divide them once
        check_for_nan_in_grad=False,
        use_distributed_optimizer=True,
    )
    return run.Config(
        nl.Trainer,
        accelerator="cpu",
        devices=1,
        max_steps=stage.steps,
        strategy=run.Config(
            NemoOnCpu, process_group_backend="gloo", ddp=ddp, ckpt_async_save=False
        ),
        plugins=run.Config(nl.MegatronMixedPrecision, precision="32", grad_reduce_in_fp32=True),
        callbacks=[run.Config(TimingCallback)],
        accumulate_grad_batches=1,
        val_check_interval=stage.steps,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        use_distributed_sampler=False,
    )


def _data(stage: Stage, store: Path, *, masked: bool) -> run.Config:
    manifest = Manifest.load(store)
    train, heldout = (list(map(str, manifest.prefixes(split))) for split in ("train", "heldout"))
    return run.Config(
        llm.PreTrainingDataModule if masked else UnmaskedDataModule,
        paths={"train": train, "validation": heldout, "test": heldout},
        split=None,
        tokenizer=run.Config(AutoTokenizer, str(manifest.tokenizer_path)),
        seq_length=stage.seq_length,
        micro_batch_size=1,
        global_batch_size=stage.sequences_per_batch,
        num_workers=0,
        pin_memory=False,
        index_mapping_dir=str(store / "index"),
        dataset_cls=UnpaddedDataset,
    )


def _optimizer(stage: Stage) -> run.Config:
    config = our_optimizer(stage, Layout(precision="fp32", device="cpu")).config
    config.use_distributed_optimizer = True
    schedule = run.Config(
        CosineAnnealingScheduler,
        max_steps=stage.steps,
        warmup_steps=stage.lr.warmup_steps(stage.steps),
        constant_steps=0,
        min_lr=stage.lr.final_ratio * stage.lr.peak,
    )
    return run.Config(nl.MegatronOptimizerModule, config=config, lr_scheduler=schedule)


def _log(folder: Path) -> run.Config:
    tensorboard = tensorboard_logger(name="nemo", save_dir=str(folder))
    log = default_log(dir=str(folder), name="nemo", tensorboard_logger=tensorboard)
    log.ckpt.train_time_interval = run.Config(timedelta, days=1)
    return log


def ours(
    card: ModelCard,
    stage: Stage,
    *,
    store: Path,
    folder: Path,
    recompute: Recompute = KEEP_ALL,
    tiling: Tiling = UNTILED,
) -> partial[Any]:
    """Return the call of `llm.pretrain` of our recipe, which writes into `folder`."""
    layout = Layout(precision="fp32", device="cpu", recompute=recompute, tiling=tiling)
    ladder = Ladder(name="measured", source="ours", stages=(stage,))
    recipe = pretrain(card, ladder, stage.seq_length, layout)
    place(recipe, card, ladder, stage, run_to=folder, store=store)
    recipe.trainer.val_check_interval = stage.steps
    recipe.log.ckpt.every_n_train_steps = stage.steps
    return fdl.build(recipe)
