# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from custom_modules.cpu.backend import cpu_backend
from custom_modules.gpt import model, moe_router
from custom_modules.rope.config import RopeScaling
from tests.custom_modules.support import llamas
from tests.custom_modules.support.shards import on_this_cp_rank
from tests.custom_modules.support.summed import summed_gradients
from tests.ranks import run_ranks

LENGTH, BATCH = 16, 2
ROPE = RopeScaling.yarn(base=10_000, factor=4.0, original_length=16)


class Answer(NamedTuple):
    """What one rank computed."""

    positions: Tensor
    """[b, s]: the tokens of this rank."""
    losses: Tensor
    """[b, s]."""
    gradients: dict[str, Tensor]
    """Summed over the ranks that Megatron sums over."""


def batch() -> dict[str, Tensor]:
    """Return two sequences; all valid tokens but one lie in one half of the zigzag."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, llamas.VOCAB, (BATCH, LENGTH + 1), generator=generator)
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.float64)
    mask[:, : LENGTH // 4] = 1
    mask[0, LENGTH // 2] = 1
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": mask,
        "position_ids": torch.arange(LENGTH).repeat(BATCH, 1),
    }


def answer(dtype: torch.dtype) -> Answer:
    """Return the masked loss and its gradients in Megatron's groups as they are now."""
    weights = llamas.megatron_weights(llamas.made_up_weights())
    model = llamas.ours(ROPE, weights, dtype)
    shard = on_this_cp_rank(batch())
    losses = model(shard["tokens"], shard["position_ids"], None, labels=shard["labels"])
    (losses * shard["loss_mask"]).sum().backward()
    return Answer(shard["position_ids"], losses.detach(), summed_gradients(model))


def answers(dtype: torch.dtype) -> dict[str, Answer]:
    """Return this rank's answer in each layout of two ranks; `alone` computes everything twice."""
    layouts = {
        "alone": {},
        "CP=2": {"context_parallel_size": 2},
        "TP=2": {"tensor_model_parallel_size": 2},
    }
    found = {}
    with cpu_backend(force=True):
        for name, sizes in layouts.items():
            parallel_state.initialize_model_parallel(**sizes)
            found[name] = answer(dtype)
            parallel_state.destroy_model_parallel()
    return found


def on_two_ranks() -> dict[torch.dtype, dict[str, Answer]]:
    """Run every layout and dtype in one set of ranks, since a rank takes seconds to start."""
    return {dtype: answers(dtype) for dtype in (torch.float64, torch.float32)}


@pytest.fixture(scope="module")
def ran() -> list[dict[torch.dtype, dict[str, Answer]]]:
    return run_ranks(on_two_ranks, 2)


# Megatron's cross entropy is fp32 whatever the dtype of the model.
DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)], ids=str
)


def test_each_context_rank_holds_its_two_chunks(ran):
    first, second = (rank[torch.float64]["CP=2"].positions[0].tolist() for rank in ran)
    assert first == [0, 1, 2, 3, 12, 13, 14, 15]
    assert second == [4, 5, 6, 7, 8, 9, 10, 11]


@DTYPES
@pytest.mark.parametrize("layout", ["CP=2", "TP=2"])
def test_the_loss_of_every_token_is_that_of_one_rank(ran, layout, dtype, tolerance):
    whole = ran[0][dtype]["alone"].losses
    for rank in ran:
        mine = rank[dtype][layout]
        expected = whole.gather(1, mine.positions)
        torch.testing.assert_close(mine.losses, expected, rtol=tolerance, atol=tolerance)


@DTYPES
def test_every_gradient_of_two_context_ranks_is_that_of_one(ran, dtype, tolerance):
    expected = ran[0][dtype]["alone"].gradients
    for rank in ran:
        assert_close(rank[dtype]["CP=2"].gradients, expected, tolerance)


@DTYPES
def test_every_gradient_of_two_tensor_ranks_is_the_part_of_one(ran, dtype, tolerance):
    whole = ran[0][dtype]["alone"].gradients
    for index, rank in enumerate(ran):
        expected = {
            name: llamas.tensor_parallel_part(name, gradient, index, 2)
            for name, gradient in whole.items()
        }
        assert_close(rank[dtype]["TP=2"].gradients, expected, tolerance)


def assert_close(ours: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Compare by the largest value of each gradient."""
    assert ours.keys() == expected.keys()
    for name, gradient in ours.items():
        error = (gradient - expected[name]).abs().max() / expected[name].abs().max()
        assert error < tolerance, f"{name} differs by {error:.1e} of its largest value"


@pytest.mark.usefixtures("megatron_rank")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "rope",
    [
        RopeScaling.base_change(10_000),
        RopeScaling.yarn(base=100, factor=4.0, original_length=16),
        RopeScaling.llama3(base=1000, factor=8.0, original_length=16),
    ],
    ids=lambda rope: rope.method,
)
def test_logits_and_gradients_are_those_of_hugging_face(rope, dtype):
    tolerance = 1e-4  # their norm and their angles are fp32 whatever the dtype
    weights = llamas.made_up_weights()
    tokens = torch.randint(0, llamas.VOCAB, (3, 61), generator=torch.Generator().manual_seed(4))
    position_ids = torch.arange(61).repeat(3, 1)
    theirs = llamas.hugging_face(rope, weights, dtype)
    ours = llamas.ours(rope, llamas.megatron_weights(weights), dtype)
    expected = theirs(tokens, position_ids=position_ids).logits
    logits = ours(tokens, position_ids, None)
    assert_close({"logits": logits}, {"logits": expected}, tolerance)

    grad_out = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    expected.backward(grad_out)
    logits.backward(grad_out)
    right = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    mine = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert_close(mine, llamas.megatron_weights(right), tolerance)


def test_no_more_ranks_share_a_host_than_there_are(monkeypatch):
    """A single process must not be refused the memory that seven others would need."""
    monkeypatch.setattr(model.dist, "is_initialized", lambda: False)
    assert model._ranks_here(8) == 1
    monkeypatch.setattr(model.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(model.dist, "get_world_size", lambda: 16)
    assert model._ranks_here(8) == 8


def test_a_router_on_a_cpu_takes_no_kernel_of_transformer_engine(monkeypatch):
    def kernel(*tensors):
        raise AssertionError("a CUDA kernel was called")

    monkeypatch.setattr(moe_router, "HAVE_TE", True)
    monkeypatch.setattr(moe_router.TopKRouter, "gating", kernel)
    router = moe_router.TokenWeightedRouter.__new__(moe_router.TokenWeightedRouter)
    torch.nn.Module.__init__(router)
    router.weight, router.bias = torch.nn.Parameter(torch.eye(2, 3)), None
    router.config = SimpleNamespace(moe_router_dtype="fp32")
    logits = router.gating(torch.tensor([[[1.0, 2.0, 3.0]]]))
    assert logits.tolist() == [[[1.0, 2.0]]]
