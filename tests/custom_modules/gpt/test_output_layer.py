# SPDX-License-Identifier: Apache-2.0
"""The tiled loss of a Megatron output layer against Megatron's own logits and cross-entropy."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from custom_modules.gpt.output_layer import loss_of
from tests.custom_modules.support import llamas
from tests.custom_modules.support.losses import HIDDEN, VOCAB, Case, whole
from tests.ranks import megatron_backend, run_ranks

CASE = Case(12, 3, 7)
FP32_TOLERANCE = 1e-5  # Megatron's cross-entropy is fp32; of values around 1, over 44 labels


class Model(MegatronModule):
    """An embedding, something added to it, and an output layer, whose weights may be tied."""

    def __init__(self, *, tiled: bool, tied: bool = False, **config) -> None:
        super().__init__(
            llamas.configuration(torch.float32, hidden_size=HIDDEN, kv_channels=2, **config)
        )
        model_parallel_cuda_manual_seed(1)
        self.tiled, self.tied = tiled, tied
        made = {"config": self.config, "init_method": torch.nn.init.normal_}
        spread = self.config.sequence_parallel
        self.embedding = VocabParallelEmbedding(
            VOCAB, HIDDEN, reduce_scatter_embeddings=spread, **made
        )
        self.output_layer = ColumnParallelLinear(
            HIDDEN, VOCAB, bias=False, skip_weight_param_allocation=tied, **made
        )

    def forward(self, ids: Tensor, added: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        embedded = self.embedding(ids)
        hidden = embedded if self.config.sequence_parallel else embedded.transpose(0, 1)
        weight = self.embedding.weight if self.tied else None
        if self.tiled:
            return loss_of(
                self.output_layer, hidden + added, labels, mask, tile=CASE.tile, weight=weight
            )
        logits, _ = self.output_layer(hidden + added, weight=weight)
        return vocab_parallel_cross_entropy(logits, labels.t().contiguous()).t() * mask


def given(share: int = 0, shares: int = 1) -> tuple[Tensor, ...]:
    """Return ids, hidden of this tensor rank, labels and mask."""
    of = whole(CASE)
    labels = of.labels.clamp(min=0)
    return labels.flip(0), of.hidden.float().chunk(shares)[share], labels, of.mask.float()


def outcome(*, tiled: bool, tied: bool, **config) -> dict[str, Tensor]:
    """Return losses and gradients on a tensor rank."""
    model = Model(tiled=tiled, tied=tied, **config)
    spread = model.config.sequence_parallel
    tp = parallel_state.get_tensor_model_parallel_group()
    ids, added, labels, mask = given(tp.rank(), tp.size()) if spread else given()
    added.requires_grad_()
    losses = model(ids, added, labels, mask)
    losses.mean().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"losses": losses.detach(), "hidden": added.grad, **grads}


def outcomes() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    with megatron_backend():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        return [
            tuple(
                outcome(tiled=tiled, tied=tied, sequence_parallel=spread) for tiled in (True, False)
            )
            for tied in (False, True)
            for spread in (False, True)
        ]


@pytest.mark.parity
def test_losses_and_gradients_over_tensor_ranks_are_those_of_megatron():
    for answers in run_ranks(outcomes, 2):
        for ours, megatrons in answers:
            assert ours.keys() == megatrons.keys()
            for name in ours:
                torch.testing.assert_close(ours[name], megatrons[name], rtol=0, atol=FP32_TOLERANCE)


def losses_of_steps(*, tiled: bool) -> list[float]:
    """Return the loss of each of 5 steps, whose parameters are gathered as the forward runs."""
    model = Model(tiled=tiled)
    ddp = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
            bucket_size=100,  # a bucket for each weight
        ),
        model,
    )
    config = OptimizerConfig(
        optimizer="adam", lr=3e-2, use_distributed_optimizer=True, clip_grad=0.0
    )
    optimizer = get_megatron_optimizer(config, [ddp])
    found = []
    for _ in range(5):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = ddp(*given()).mean()
        loss.backward()
        ddp.finish_grad_sync()
        optimizer.step()
        found.append(float(loss))
    return found


def train() -> list[list[float]]:
    with megatron_backend():
        parallel_state.initialize_model_parallel()
        return [losses_of_steps(tiled=tiled) for tiled in (True, False)]


@pytest.mark.parity
def test_an_output_layer_trains_as_megatrons_with_its_weight_gathered_meanwhile():
    for tiled, plain in run_ranks(train, 2):
        assert tiled == pytest.approx(plain, rel=1e-5)
        assert tiled[-1] < 0.95 * tiled[0]


@pytest.fixture
def output_layer(megatron_rank):
    return Model(tiled=True).output_layer


def refused(words: str, output_layer, **other) -> None:
    _, hidden, labels, mask = given()
    with pytest.raises(ValueError, match=words):
        loss_of(output_layer, hidden, labels, mask, tile=4, **other)


def test_a_weight_gradient_to_be_deferred_is_refused(output_layer):
    output_layer.config.defer_embedding_wgrad_compute = True
    refused("defer_embedding_wgrad_compute is on", output_layer)


def test_a_bias_is_refused(output_layer):
    output_layer.bias = torch.nn.Parameter(torch.zeros(VOCAB))
    refused("the output layer has a bias", output_layer)


def test_a_layer_that_leaves_gradients_unreduced_is_refused(output_layer):
    output_layer.disable_grad_reduce = True
    refused("disable_grad_reduce, a LoRA adapter's", output_layer)


def test_a_weight_that_is_missing_or_of_another_shape_is_refused(output_layer):
    weight = torch.zeros(VOCAB, HIDDEN + 1)
    refused(r"weight is \[44, 7\]; the output layer's is \[44, 6\]", output_layer, weight=weight)
    output_layer.weight = None
    refused("give the tied one as weight", output_layer)
