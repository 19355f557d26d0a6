# SPDX-License-Identifier: Apache-2.0
"""Adapters of NeMo's GPT configs and model to `custom_modules`."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from megatron.core import parallel_state
from megatron.core.activations import fast_gelu
from megatron.core.utils import get_batch_on_this_cp_rank
from nemo.collections.llm.gpt.model.base import GPTModel
from nemo.collections.llm.gpt.model.llama import LlamaConfig
from nemo.collections.llm.gpt.model.mistral import MistralConfig7B
from nemo.collections.llm.gpt.model.mixtral import MixtralConfig
from nemo.collections.llm.gpt.model.nemotron import NemotronConfig
from nemo.collections.llm.gpt.model.qwen2 import Qwen2Config
from nemo.collections.llm.gpt.model.qwen3 import Qwen3Config, Qwen3MoEConfig
from nemo.lightning.megatron_parallel import MaskedTokenLossReduction
from torch import Tensor

from custom_modules.attention.documents import Documents
from custom_modules.attention.registry import KernelName
from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.gpt.block import LLAMA, Block
from custom_modules.gpt.model import LongContextGPT
from custom_modules.memory.config import Offload, Recompute, Tiling
from custom_modules.metrics.event_timers import COPY_TIMER, DATA_TIMER, timed
from custom_modules.metrics.loss_bins import LossBins
from custom_modules.metrics.tally import Tally
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.layers import LayerPattern
from recipes.nemo2.rotation_check import RotationCheck


def forward_step(model: torch.nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the loss per token [b, s] on the last pipeline stage, hidden states before it."""
    return model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],  # a tiled loss skips masked tokens
        packed_seq_params=batch.get("documents"),
        rope_scale=batch.get("rope_scale"),
    )


def ranks_per_node() -> int:
    """Return the number of ranks on this node, which its fast links join.

    Taken from torchrun; without it one per GPU, or all on CPU.
    """
    said = os.environ.get("LOCAL_WORLD_SIZE")
    if said is not None:
        return int(said)
    on_gpus = torch.distributed.get_backend() == "nccl"
    return torch.cuda.device_count() if on_gpus else torch.distributed.get_world_size()


@dataclass(kw_only=True)
class LongContextMixin:
    """Mixin for a NeMo GPT config that builds a `LongContextGPT`.

    It is not a `GPTConfig`: as a dataclass base that would override the defaults of the family's
    config with its own.
    """

    rope: RopeScaling = field(default_factory=lambda: RopeScaling.base_change(10_000))
    pattern: LayerPattern | None = None
    block: ClassVar[Block] = LLAMA
    cp: ContextParallelKind = field(default_factory=ContextParallelKind)
    attention_kernel: KernelName = "auto"
    recompute: Recompute = field(default_factory=Recompute)
    tiling: Tiling = field(default_factory=Tiling)
    offload: Offload = field(default_factory=Offload)
    transformer_engine: bool = False
    position_embedding_type: str = "none"  # our rotation, from the position ids
    calculate_per_token_loss: bool = True  # sum(loss) / sum(tokens) over DP and CP
    forward_step_fn: Callable[..., Tensor] = forward_step

    def __post_init__(self) -> None:
        """Set Megatron-Core's fields for its own kinds of recompute before it checks them."""
        self.rotary_interleaved = self.rope.interleaved
        for name, value in self.recompute.megatron_settings().items():
            given = getattr(self, name)
            # Megatron-Core fills in the modules even if nothing is recomputed.
            if given and given != value and name != "recompute_modules":
                raise ValueError(
                    f"{name} is {given!r} and recompute is {self.recompute.kind}, which means "
                    f"{value!r}; set only recompute"
                )
            setattr(self, name, value)
        super().__post_init__()  # type: ignore[misc]  # of the NeMo config this is mixed into

    def configure_model(
        self,
        tokenizer: Any,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> LongContextGPT:
        """Build this rank's pipeline stage with the config's vocabulary, not the tokenizer's."""
        config: Any = self  # the NeMo config this is mixed into
        if vp_stage is None and config.virtual_pipeline_model_parallel_size:
            vp_stage = 0  # NeMo names the stage of all chunks but the first
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        return LongContextGPT(
            config,
            rope=self.rope,
            pattern=self.pattern,
            block=self.block,
            cp=self.cp,
            kernel=self.attention_kernel,
            ranks_per_node=ranks_per_node(),
            transformer_engine=self.transformer_engine,
            recompute=self.recompute,
            tiling=self.tiling,
            offload=self.offload,
            vocab_size=config.vocab_size,
            max_sequence_length=config.seq_length,
            parallel_output=config.parallel_output,
            share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
            pre_process=first if pre_process is None else pre_process,
            post_process=last if post_process is None else post_process,
            vp_stage=vp_stage,
        )


@dataclass(kw_only=True)
class LongContextLlamaConfig(LongContextMixin, LlamaConfig):
    """NeMo's Llama config with a `LongContextGPT` as its model."""


@dataclass(kw_only=True)
class LongContextQwen2Config(LongContextMixin, Qwen2Config):
    """NeMo's Qwen 2 and 2.5 config with a `LongContextGPT` as its model."""


@dataclass(kw_only=True)
class LongContextQwen3Config(LongContextMixin, Qwen3Config):
    """NeMo's config of dense Qwen 3 with a `LongContextGPT` as its model."""


@dataclass(kw_only=True)
class LongContextMistralConfig(LongContextMixin, MistralConfig7B):
    """NeMo's Mistral config with a `LongContextGPT` as its model; attention has no window."""

    window_size: list[int] | None = None
    cp_comm_type: str | None = None  # set by the config's cp


@dataclass(kw_only=True)
class LongContextMixtralConfig(LongContextMixin, MixtralConfig):
    """NeMo's Mixtral config with a `LongContextGPT` as its model."""


@dataclass(kw_only=True)
class LongContextQwen3MoeConfig(LongContextMixin, Qwen3MoEConfig):
    """NeMo's config of Qwen 3 with experts, with a `LongContextGPT` as its model."""


@dataclass(kw_only=True)
class LongContextNemotronConfig(LongContextMixin, NemotronConfig):
    """NeMo's Nemotron 3 and 4 config with a `LongContextGPT` as its model."""


@dataclass(kw_only=True)
class LongContextSmolLM3Config(LongContextMixin, LlamaConfig):
    """SmolLM3, of which NeMo has no config: Llama's, whose pattern of layers is the recipe's."""


@dataclass(kw_only=True)
class LongContextOlmo3Config(LongContextMixin, LlamaConfig):
    """Olmo 3, of which NeMo has no config: Llama's with its norms after attention and MLP."""

    block: ClassVar[Block] = Block(pre_norm=False, post_norm=True, wide_qk_norm=True)


@dataclass(kw_only=True)
class LongContextGemma3Config(LongContextMixin, LlamaConfig):
    """Gemma 3's text models, on Llama's config: NeMo's own builds its layers by itself."""

    block: ClassVar[Block] = Block(post_norm=True, scaled_embedding=True)
    activation_func: Callable[[Tensor], Tensor] = fast_gelu
    bias_activation_fusion: bool = False  # Megatron-Core fuses another formula of GELU
    qk_layernorm: bool = True
    layernorm_zero_centered_gamma: bool = True


class TokenWeightedLoss(MaskedTokenLossReduction):
    """NeMo's reduction, which also stores the number of valid tokens of the mean."""

    valid_tokens: Tensor | None = None
    """Valid tokens of the last `reduce`; None on pipeline stages without the loss."""
    spread: Tensor | None = None
    """Standard deviation over the micro-batches of the last `reduce` of their mean loss."""
    bins: LossBins | None = None
    """Where the losses of training are counted by position and source; None: they are not."""
    micro_batches: list[Tensor] = []  # noqa: RUF012  (replaced by each `reduce`, never changed)
    """Sum of losses and valid tokens [2] of each micro-batch of the last `reduce`, on this rank."""

    def forward(
        self, batch: dict[str, Tensor], forward_out: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return sum, number of valid tokens and both for `reduce`, as NeMo does."""
        result: tuple[Tensor, Tensor, dict[str, Tensor]] = super().forward(batch, forward_out)
        if self.bins is not None and not self.validation_step:
            mask, positions = batch["loss_mask"], batch["position_ids"]
            self.bins.add(forward_out, mask, positions, batch.get("source"))
        return result

    def reduce(self, losses_reduced_per_micro_batch: list[dict[str, Tensor]]) -> Tensor:
        """Return sum(loss) / sum(tokens) over the batch, DP and CP; 0 if no token is valid."""
        device = torch.cuda.current_device()
        pairs = [one["loss_sum_and_ub_size"] for one in losses_reduced_per_micro_batch]
        self.micro_batches = pairs
        total = torch.stack(pairs).sum(0) if pairs else torch.zeros(2, device=device)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        torch.distributed.all_reduce(total, group=group)
        self.valid_tokens = total[1]
        self.spread = _spread(pairs) if pairs and not self.validation_step else None
        return total[0] / total[1].clamp(min=1)


def _spread(pairs: list[Tensor]) -> Tensor:
    """Return the standard deviation of the mean loss of micro-batches, over all data ranks.

    Each pair [2] is this rank's sum of losses and number of valid tokens of a micro-batch.
    """
    table = torch.stack(pairs).double()
    if parallel_state.get_context_parallel_world_size() > 1:
        torch.distributed.all_reduce(table, group=parallel_state.get_context_parallel_group())
    # Not selected by a mask: the host would wait for the device before it launches the optimizer.
    counts = table[:, 1] > 0
    means = torch.where(counts, table[:, 0] / table[:, 1], 0.0)
    sums = torch.stack([counts.double().sum(), means.sum(), (means**2).sum()])
    torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    count = sums[0].clamp(min=1)
    return (sums[2] / count - (sums[1] / count) ** 2).clamp(min=0).sqrt()


class LongContextModel(GPTModel):
    """NeMo's GPT module with batches counted and positions on every pipeline stage."""

    def __init__(
        self,
        config: LongContextMixin,
        optim: Any = None,
        tokenizer: Any = None,
        model_transform: Any = None,
    ) -> None:
        """Store the config; `llm.pretrain` sets optimizer and tokenizer on module and record."""
        super().__init__(config, optim, tokenizer, model_transform)
        self._training_loss_reduction: TokenWeightedLoss | None = None
        self._validation_loss_reduction: TokenWeightedLoss | None = None
        self.tally = Tally()

    def configure_callbacks(self) -> list[Callback]:
        """Return the check that every training of this model has, whatever its recipe lists."""
        return [RotationCheck()]

    def forward(self, *inputs: Any, **megatron: Any) -> Tensor:
        """Return the output of Megatron-Core's model; NeMo's own forward drops `loss_mask`."""
        out: Tensor = self.module(*inputs, **megatron)
        return out

    def data_step(self, dataloader_iter: Iterator[Any]) -> dict[str, Any]:
        """Return this rank's zigzag shard of the next micro-batch, each entry [b, s].

        If documents are kept apart, `documents` is the table of the whole sequences. If the
        rotation is drawn, `rope_scale` [b] stays on the CPU, where its frequencies are computed.
        """
        timers = self.config.timers
        with timed(timers, DATA_TIMER):
            asked = time.perf_counter()
            batch = next(dataloader_iter)
            self.tally.waited += time.perf_counter() - asked
        batch = batch[0] if isinstance(batch, tuple) else batch
        keys = ("tokens", "labels", "loss_mask", "position_ids")
        with timed(timers, COPY_TIMER):
            shard: dict[str, Tensor] = {key: batch[key].cuda(non_blocking=True) for key in keys}
        if "sharded" not in batch:  # else the rank has read its shard alone
            shard = get_batch_on_this_cp_rank(shard)
        self.tally.add(shard["tokens"], batch["sample_id"], batch.get("row_facts"))
        if "source" in batch:
            shard["source"] = batch["source"].cuda(non_blocking=True)
        if "rope_scale" in batch:
            shard["rope_scale"] = batch["rope_scale"]
        if "document_lengths" in batch:
            lengths = batch["document_lengths"]
            return {**shard, "documents": Documents.of([row[row > 0].tolist() for row in lengths])}
        if "document_starts" in batch:
            return {**shard, "documents": Documents.from_starts(batch["document_starts"])}
        return shard

    @property
    def training_loss_reduction(self) -> TokenWeightedLoss:
        """Mean over valid tokens of the whole batch."""
        if not self._training_loss_reduction:
            self._training_loss_reduction = TokenWeightedLoss()
        return self._training_loss_reduction

    @property
    def validation_loss_reduction(self) -> TokenWeightedLoss:
        """Mean over valid tokens of the whole batch."""
        if not self._validation_loss_reduction:
            self._validation_loss_reduction = TokenWeightedLoss(validation_step=True)
        return self._validation_loss_reduction
