# SPDX-License-Identifier: Apache-2.0
"""Rotations by length, of a part of each head and in interleaved pairs, over two context ranks."""

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.rope.config import RopeScaling
from tests.custom_modules.support import llamas
from tests.custom_modules.support.shards import on_this_cp_rank
from tests.custom_modules.support.summed import summed_gradients
from tests.custom_modules.support.zigzag import made_up
from tests.ranks import megatron_backend, run_ranks

LENGTH, BATCH = 32, 2
SIZES = {"base": 1000, "factor": 4.0, "original_length": 16}
LISTS = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
ROTATIONS = {  # a rank holds 16 of the 32 tokens, the original length of those that go by it
    "dynamic": RopeScaling.dynamic(**SIZES),
    "longrope": RopeScaling(method="longrope", **SIZES, **LISTS),
    "interleaved": RopeScaling(method="yarn", **SIZES, interleaved=True),
    "half of each head": RopeScaling(method="linear", **SIZES, partial_rotary_factor=0.5),
    "half-split": RopeScaling(method="yarn", **SIZES),
}
KINDS = ("ring", "ulysses", "head_chunked")
TO_INTERLEAVED = torch.tensor([0, 2, 1, 3])
"""Where the dimensions of a head of 4 stand when those that turn together are neighbours."""


def interleaved(weights: llamas.Weights) -> llamas.Weights:
    """Return the weights of the same model in interleaved pairs."""
    found = dict(weights)
    for name, weight in weights.items():
        if "q_proj" in name or "k_proj" in name:
            heads = weight.unflatten(0, (-1, llamas.HEAD_DIM))[:, TO_INTERLEAVED]
            found[name] = heads.flatten(0, 1)
    return found


def answer(rope: RopeScaling, kind: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return where this rank's tokens stand, their logits, and the summed gradients."""
    weights = llamas.made_up_weights()
    weights = interleaved(weights) if rope.interleaved else weights
    model = llamas.ours(
        rope,
        llamas.megatron_weights(weights),
        torch.float64,
        cp=ContextParallelKind(kind=kind),
        rotary_interleaved=rope.interleaved,
    )
    (grad_out,) = made_up((BATCH, LENGTH, llamas.VOCAB), seed=3)
    positions = torch.arange(LENGTH).repeat(BATCH, 1)
    shard = on_this_cp_rank(
        {
            "tokens": grad_out[:, :, 0].mul(1e6).long() % llamas.VOCAB,
            "position_ids": positions,
            "grad_out": grad_out,
        }
    )
    logits = model(shard["tokens"], shard["position_ids"], None)
    logits.backward(shard["grad_out"])
    return shard["position_ids"][0], logits.detach(), summed_gradients(model)


def answers() -> dict[tuple[int, str, str], tuple[Tensor, Tensor, dict[str, Tensor]]]:
    found = {}
    with megatron_backend():
        for cp, kinds in ((1, KINDS[1:]), (2, KINDS)):
            parallel_state.initialize_model_parallel(context_parallel_size=cp)
            for kind in kinds:
                for name, rope in ROTATIONS.items():
                    found[cp, kind, name] = answer(rope, kind)
            parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def ran():
    return run_ranks(answers, 2)


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ROTATIONS)
def test_two_context_ranks_turn_heads_as_one_does(ran, kind, name):
    _, whole, gradients = ran[0][1, "ulysses", name]
    for of_rank in ran:
        at, logits, of_both = of_rank[2, kind, name]
        torch.testing.assert_close(logits, whole[:, at], rtol=1e-10, atol=1e-10)
        for parameter, gradient in of_both.items():
            torch.testing.assert_close(gradient, gradients[parameter], rtol=1e-9, atol=1e-9)


@pytest.mark.parity
def test_interleaved_pairs_are_the_same_model_as_half_split_ones(ran):
    for kind in KINDS[1:]:
        _, ours, _ = ran[0][1, kind, "interleaved"]
        _, split, _ = ran[0][1, kind, "half-split"]
        torch.testing.assert_close(ours, split, rtol=1e-10, atol=1e-10)
